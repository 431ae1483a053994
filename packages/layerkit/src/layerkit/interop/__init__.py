"""Import and export of models of other libraries, such as `layerkit.interop.hugging_face`."""
