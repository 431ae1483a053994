"""Check the built documentation site: the API reference, code blocks, links and anchors.

Run by the `docs` session after the build:

    python3 scripts/check_site.py docs/_build/html

Every public name must have an entry in the reference, and so must every name of the packages that
a code block on a page imports. Every link between pages must lead to an existing page and anchor.
`--open` opens the site in a browser instead; without one the path is printed.
"""

from __future__ import annotations

import ast
import re
import sys
import webbrowser
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs" / "_extensions"))

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PACKAGES = ("layerkit", "layerkit_inputs", "layerkit_runner", "layerkit_experiments")


class Page(HTMLParser):
    """The links and anchors of a page.

    Attributes:
      links: Targets of links.
      anchors: Ids of elements.
      nested: Targets of links inside of another link, which browsers separate.
    """

    def __init__(self, path: Path):
        """Read a page."""
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.nested: list[str] = []
        self._is_in_link = False
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the id and the target of an element."""
        values = dict(attrs)
        self.anchors.add(values.get("id") or "")
        target = values.get("href" if tag == "a" else "src")
        if target:
            self.links.append(target)
        if tag == "a":
            if self._is_in_link:
                self.nested.append(target or "")
            self._is_in_link = True

    def handle_endtag(self, tag: str) -> None:
        """Record the end of a link."""
        self._is_in_link = self._is_in_link and tag != "a"


def broken_links(site: Path) -> Iterator[str]:
    """Yield a line for each link to a missing page or anchor, and for each link in a link."""
    # Pages of sources have an anchor for each line, and no other links.
    paths = [path for path in site.rglob("*.html") if path.parent.name != "source"]
    pages = {path.resolve(): Page(path) for path in paths}
    for path, page in pages.items():
        for link in page.nested:
            yield f"{path.relative_to(site.resolve())}: {link}: inside of another link"
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            where = f"{path.relative_to(site.resolve())}: {link}"
            if not target.exists():
                yield f"{where}: no such page"
            elif target in pages and parts.fragment:
                missing = {unquote(parts.fragment)} - pages[target].anchors
                yield from (f"{where}: no such anchor" for _ in missing)


def documented_names(site: Path) -> set[str]:
    """Return the paths of the objects in the reference."""
    from sphinx.util.inventory import InventoryFile

    with (site / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, uri: uri)
    return {name for kind in inventory for name in inventory[kind] if kind.startswith("py:")}


def missing_names(documented: set[str]) -> Iterator[str]:
    """Yield the public names without an entry; one export of an object has the entry of all."""
    import public_names

    modules = [module for page in public_names.PAGES.values() for module in page]
    modules += public_names.recipe_modules()
    exported = [(module, name) for module in modules for name in public_names.names_of(module)]
    homes = {
        (public_names.home_of(module, name), name)
        for module, name in exported
        if f"{module}.{name}" in documented
    }
    for module, name in exported:
        if (public_names.home_of(module, name), name) not in homes:
            yield f"{module}.{name}"
    yield from (path for path in public_names.experiments() if path not in documented)


def missing_imports(documented: set[str]) -> Iterator[str]:
    """Yield the names that code blocks of the pages import and that have no entry."""
    by_name = {path.rpartition(".")[2] for path in documented}
    for page in sorted(ROOT.glob("docs/**/*.md")):
        for block in BLOCK.finditer(page.read_text()):
            try:
                tree = ast.parse(block[1])
            except SyntaxError:
                continue  # an excerpt
            for node in ast.walk(tree):
                if not isinstance(node, ast.ImportFrom) or not node.module:
                    continue
                if node.module.partition(".")[0] in PACKAGES:
                    for alias in node.names:
                        is_module = f"{node.module}.{alias.name}" in documented
                        if alias.name not in by_name and not is_module:
                            yield f"{page.name} imports {node.module}.{alias.name}"


def main() -> int:
    """Check or open the site; return the status."""
    site = Path(sys.argv[-1])
    index = (site / "index.html").resolve()
    if "--open" in sys.argv:
        if not (sys.stdout.isatty() and webbrowser.open(index.as_uri())):
            print(f"The documentation is in {index}")
        return 0
    documented = documented_names(site)
    problems = [f"broken link: {line}" for line in broken_links(site)]
    problems += [f"not in the reference: {name}" for name in missing_names(documented)]
    problems += [f"not in the reference: {line}" for line in missing_imports(documented)]
    pages = len(list(site.rglob("*.html")))
    print(f"{pages} pages, {len(documented)} names in the reference, {len(problems)} problems")
    print("\n".join(problems))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
