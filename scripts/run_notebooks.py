"""Run the notebooks of docs/notebooks and docs/gallery, each in a new kernel.

    python scripts/run_notebooks.py [--update] [NOTEBOOK ...]

A cell that fails, that writes a warning or anything else to stderr, or whose stored output is out
of date ends the run with exit code 1. Stored outputs are compared without numbers, checksums and
temporary folders, which differ; those of cells with the tag `sampled` are not compared. The last
lines give the seconds of each notebook. `--update` writes the outputs into the notebooks, which
show them where they are not run, as on the site, with pictures of at most 256 colors, and the first
picture of each notebook of the gallery into docs/gallery/pictures. A notebook whose metadata has
modules in `requires` that are not installed is skipped.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import io
import re
import sys
import tempfile
import time
from pathlib import Path

import nbclient
import nbformat
from PIL import Image

DOCS = Path(__file__).resolve().parents[1] / "docs"
CELL_TIMEOUT_S = 300
# Progress bars, and notes about the decoding of a loaded model and an optional kernel of PEFT's.
_NOTE = re.compile("step/s|s/step|^(generation|end tokens)  |^WARNING:bitsandbytes")
# Temporary folders, checksums, addresses, numbers and white space.
_VARIES = re.compile(r"tmp\w{8}|[\da-f]{12,}|0x[\da-f]+|[-+]?\d[\d.,]*(e[-+]\d+)?|\s+")


def main(arguments: list[str]) -> int:
    """Run the notebooks and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help="write the outputs into the files")
    parser.add_argument("notebooks", nargs="*", type=Path, help="default: all")
    options = parser.parse_args(arguments)
    failed, seconds = [], {}
    notebooks = [*DOCS.glob("notebooks/*.ipynb"), *DOCS.glob("gallery/*.ipynb")]
    for path in options.notebooks or sorted(notebooks):
        started = time.monotonic()
        notebook = nbformat.read(path, as_version=4)
        required = notebook.metadata.get("requires", ())
        if missing := [name for name in required if not importlib.util.find_spec(name)]:
            print(f"skipped {path.stem}, which needs {', '.join(missing)}")
            continue
        stored = printed_outputs(notebook)
        problem = run(notebook)
        seconds[path.stem] = time.monotonic() - started
        if problem:
            failed.append(path.stem)
            print(f"{path.name}: {problem}", file=sys.stderr)
        elif options.update:
            pictures = shrink_pictures(notebook)
            nbformat.write(notebook, path)
            if path.parent.name == "gallery":
                file = path.parent / "pictures" / f"{path.stem}.png"
                file.write_bytes(base64.b64decode(pictures[0]))
        elif cells := [c for c, text in printed_outputs(notebook).items() if text != stored[c]]:
            failed.append(path.stem)
            print(f"{path.name}: renew the outputs by --update; cells {cells}", file=sys.stderr)
    for name, duration in seconds.items():
        print(f"{duration:6.1f} s  {name}{'  FAILED' if name in failed else ''}")
    return 1 if failed else 0


def run(notebook: nbformat.NotebookNode) -> str | None:
    """Run the cells in a temporary folder, and replace their outputs.

    Returns:
      The error of the first cell that failed or wrote to stderr, or None.
    """
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_S,
            record_timing=False,
            extra_arguments=["--log-level=ERROR"],  # Kernels warn that they use TCP.
            resources={"metadata": {"path": folder}},
        )
        try:
            client.execute()
        except (nbclient.exceptions.CellExecutionError, nbclient.exceptions.CellTimeoutError) as e:
            return str(e)
    for cell in notebook.cells:
        for output in [o for o in cell.get("outputs", ()) if o.get("name") == "stderr"]:
            lines = filter(None, re.split(r"[\r\n]+", output.text.strip()))
            if not all(map(_NOTE.search, lines)):
                return f"a cell wrote to stderr:\n{cell.source}\n{output.text}"
            cell.outputs.remove(output)  # a progress bar, or the defaults of a loaded folder
        drop_run_log(cell)
    return None


def printed_outputs(notebook: nbformat.NotebookNode) -> dict[int, str]:
    """Return the text outputs without numbers by the index of the cell, except of sampled text."""
    texts = {}
    for index, cell in enumerate(notebook.cells):
        if "sampled" not in cell.metadata.get("tags", ()):
            outputs = cell.get("outputs", ())
            text = "".join(
                o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs
            )
            texts[index] = _VARIES.sub(" ", text)
    return texts


def shrink_pictures(notebook: nbformat.NotebookNode) -> list[str]:
    """Reduce the pictures of the outputs to 256 colors; return them as base64."""
    pictures = []
    for output in [output for cell in notebook.cells for output in cell.get("outputs", ())]:
        if picture := output.get("data", {}).get("image/png"):
            image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
            shrunk = io.BytesIO()
            image.quantize(256, dither=Image.Dither.NONE).save(shrunk, "PNG", optimize=True)
            output.data["image/png"] = base64.b64encode(shrunk.getvalue()).decode()
            pictures.append(output.data["image/png"])
    return pictures


def drop_run_log(cell: nbformat.NotebookNode) -> None:
    """Remove the log of a training run, which names folders of this machine, from the outputs.

    The log ends with the commands to try next. What the cell prints after them is kept.
    """
    printed = [o for o in cell.get("outputs", ()) if o.get("name") == "stdout"]
    text = "".join(output.text for output in printed)
    if "\nnext: " not in text:
        return
    cell.outputs = [output for output in cell.outputs if output not in printed]
    kept = re.split(r"^  runner (?:.*\\\n)*.*\n", text, flags=re.M)[-1]
    if kept:
        cell.outputs.insert(0, nbformat.v4.new_output("stream", name="stdout", text=kept))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
