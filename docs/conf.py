"""Settings of the documentation site; `python3 start.py docs` builds it.

The API reference is written by `_extensions/api_reference.py` before each build. `_toc.yml` sorts
the pages into parts.
"""

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS / "_extensions"))

from source_pages import link_source as linkcode_resolve  # noqa: E402, F401 - read by Sphinx

project = "layerkit"
author = "The layerkit authors"
copyright = author  # noqa: A001 - a name that Sphinx reads

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.linkcode",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_external_toc",
    "sphinxext.opengraph",
    "api_reference",
    "api_links",
    "command_lexer",
    "plan_pages",
    "repository_links",
    "source_pages",
]
external_toc_path = "_toc.yml"
nb_execution_mode = "off"  # the notebooks hold their outputs
exclude_patterns = ["_build", "decisions/0000-template.md"]
nitpicky = False  # types of other libraries have no page here
default_role = "py:obj"  # single backticks of docstrings

# Headings get the anchors that GitHub gives them.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_attr_annotations = False  # types and defaults are in the signature
toc_object_entries_show_parents = "hide"

highlight_language = "text"  # output, unless a block names a language
smartquotes = False  # `--flag` keeps its hyphens
html_theme = "furo"
html_title = "layerkit"
html_static_path = ["_static"]
html_css_files = ["site.css"]
ogp_site_name = "layerkit"
ogp_image = "_images/report_light.webp"
ogp_social_cards = {"enable": False}  # a picture for each page, which takes as long as the rest
html_search_scorer = str(DOCS / "_static" / "search_scorer.js")
html_copy_source = False
html_show_sourcelink = False
copybutton_exclude = ".linenos, .gp, .go"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
suppress_warnings = [
    "misc.highlighting_failure",  # output with `…` in code blocks
    "ref.python",  # short names that several classes have
]
