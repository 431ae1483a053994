"""Every command line of `runner` in the documentation parses, and names fields that exist."""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from layerkit_runner.config import flags as command_flags
from layerkit_runner.config.flags import parse_flags
from layerkit_runner.config.registry import find_experiment
from layerkit_runner.config.requests import Override, ParsedFlags
from layerkit_runner.errors import UsageError
from layerkit_runner.run.resolve import resolve_entry
from layerkit_runner.run_options import FLAGS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    page
    for pattern in ("README.md", "docs/**/*.md", "packages/*/README.md", "benchmarks/*.md")
    for page in ROOT.glob(pattern)
    if "_build" not in page.parts
)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# A command begins a line, after a prompt, environment variables or a launcher, or inline code.
IN_BLOCK = re.compile(r"^ *(?:\$ |srun (?:-\S+ )*|\w+=\S+ )*(runner (?!\().*)$", re.MULTILINE)
INLINE = re.compile(r"`(runner [^`]+)`")
# Experiments that a page defines or invents.
INVENTED = ("mine.", "regression.", "tuned.", "downloaded.", "assistant.", "NAME")
# Words left out, a variable of the shell, help on a topic, and the mode that a page adds.
INCOMPLETE = re.compile(r"…|\$|--help|--mode=count|^count")
FLAG = re.compile(r"`--(\w+)=([a-z]\w*)`")


def documented_commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command, without comments and redirections."""
    text = page.read_text().replace("\\\n", " ")
    blocks = "\n".join(FENCE.findall(text))
    for line in [*IN_BLOCK.findall(blocks), *INLINE.findall(FENCE.sub("", text))]:
        # Brackets mark an optional flag.
        line = re.sub(r" \[(--[^ ]+)\]", r" \1", re.split(r" (?:&|>|\|) ?| {2,}#", line)[0])
        yield shlex.split(line, comments=True)[1:]


@functools.cache
def check_fields(exp: str, overrides: tuple[Override, ...], reduced: bool) -> None:
    try:
        resolve_entry(find_experiment(exp), overrides, reduced=reduced)
    except UsageError as error:
        # The names are checked before a file is opened that only the reader of the page has.
        if not re.search("file not found|no such file", str(error)):
            raise


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_parse_and_name_fields_that_exist(page: Path):
    recorded: dict[str | None, ParsedFlags] = {}  # by job folder
    for words in documented_commands(page):
        if (
            not words
            or words[0] in command_flags.entry_points()
            or INCOMPLETE.search(" ".join(words))
        ):
            continue
        print("runner", *words)  # names the command that fails
        flags = parse_flags(words)
        job = recorded.get(flags.options.job_log_dir)
        if flags.exp is None and job is not None:
            flags = dataclasses.replace(
                flags, exp=job.exp, overrides=job.overrides + flags.overrides
            )
        if flags.exp is not None and not flags.exp.startswith(INVENTED):
            recorded[flags.options.job_log_dir] = flags
            check_fields(flags.exp, flags.overrides, bool(flags.values.get("reduced")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_in_the_text_of_a_page_have_values_that_exist(page: Path):
    choices = {row.name: row.choices for row in FLAGS if row.choices}
    for name, value in FLAG.findall(page.read_text()):
        assert value in choices.get(name, [value]), f"--{name}={value}"
