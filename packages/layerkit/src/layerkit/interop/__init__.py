"""Models of other libraries: `layerkit.interop.hugging_face` reads and writes their folders."""
