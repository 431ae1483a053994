"""Check the wheels and sdists of a release, and print the commands that tag it.

Run by the `release` session:

    python3 scripts/check_release.py dist

Versions must agree between the files, `_version.py` and the changelog. A package whose changelog
begins with an unreleased section is not published, so that the version of this section may differ.
The bounds of a package on its siblings must allow their versions.
"""

from __future__ import annotations

import re
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
_UNRELEASED = "unreleased"


def versions() -> dict[str, tuple[Path, str]]:
    """Return (folder, version) of each distribution by name."""
    result = {}
    for project in sorted((ROOT / "packages").glob("*/pyproject.toml")):
        name = tomllib.loads(project.read_text())["project"]["name"]
        (source,) = project.parent.glob("src/*/_version.py")
        version = re.search(r'__version__ = "(.+)"', source.read_text())
        assert version is not None, source
        result[name] = (project.parent, version[1])
    return result


def newest_section(folder: Path) -> tuple[str, str]:
    """Return (version, date or `unreleased`) of the newest section of a changelog."""
    text = (folder / "CHANGELOG.md").read_text()
    heading = re.search(r"^## \[(.+?)\] - (.+)$", text, re.MULTILINE)
    return (heading[1], heading[2].strip()) if heading else ("no version", "")


def problems(dist: Path) -> list[str]:
    """Return a line for each thing that is wrong."""
    result = []
    known = versions()
    for name, (folder, version) in known.items():
        stem = f"{name.replace('-', '_')}-{version}"
        wheel, sdist = dist / f"{stem}-py3-none-any.whl", dist / f"{stem}.tar.gz"
        noted, date = newest_section(folder)
        if date != _UNRELEASED and noted != version:
            result.append(f"{name}: the changelog begins with {noted}, not {version}")
        members: dict[Path, list[str]] = {}
        for path in (wheel, sdist):
            if not path.is_file():
                result.append(f"{name}: {path.name} is missing")
            elif path is wheel:
                members[path] = zipfile.ZipFile(path).namelist()
            else:
                with tarfile.open(path) as archive:
                    members[path] = archive.getnames()
        for path, names in members.items():
            expected = ("LICENSE", "py.typed") if path is wheel else ("LICENSE", "CHANGELOG.md")
            for file in expected:
                if not any(member.endswith(f"/{file}") for member in names):
                    result.append(f"{name}: {path.name} lacks {file}")
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        for requirement in map(Requirement, project.get("dependencies", ())):
            if requirement.name in known:
                sibling = known[requirement.name][1]
                if not requirement.specifier.contains(sibling, prereleases=True):
                    result.append(f"{name}: {requirement} does not allow {sibling}")
    return result


def main() -> int:
    """Print problems, or the commands that tag the packages to publish; return the status."""
    result = problems(Path(sys.argv[1]))
    for line in result:
        print(line)
    if not result:
        for name, (folder, version) in versions().items():
            if newest_section(folder)[1] == _UNRELEASED:
                print(f"{name} is not published: its changelog begins with an unreleased section")
            else:
                print(f'git tag -a {name}-v{version} -m "{name} {version}"')
    return int(bool(result))


if __name__ == "__main__":
    sys.exit(main())
