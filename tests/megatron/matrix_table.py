"""What the matrix found, kept as JSON, and its table in a page of docs/."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- matrix -->", "<!-- end of matrix -->"


@dataclass(frozen=True)
class Results:
    """What is kept in docs/`page`_matrix.json, and shown in docs/`page`.md."""

    page: str

    def keep(self, version: str, commit: str, name: str, found: dict) -> None:
        """Add what was found in one configuration; results of another commit of the same version are dropped."""
        kept = self._kept()
        if kept.get(version, {}).get("commit") != commit:
            kept[version] = {"commit": commit, "found": {}}
        before = kept[version]["found"].get(name, {})
        kept[version]["found"][name] = found if found["stock"] else before | found
        self._file.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")

    def is_kept(self, version: str, commit: str, name: str, way: str) -> bool:
        kept = self._kept().get(version, {"commit": None})
        found = kept["found"].get(name, {}) if kept["commit"] == commit else {}
        return way in found or bool(found.get("stock"))

    def write(self, passed: Callable[[str, dict], bool], names: list[str], ways: tuple[str, ...]) -> None:
        """Put the table of all that is kept between the marks of the page."""
        page = DOCS / f"{self.page}.md"
        before, _, rest = page.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        page.write_text(f"{before}{BEGIN}\n{table(self._kept(), passed, names, ways)}{END}{after}")

    @property
    def _file(self) -> Path:
        return DOCS / f"{self.page}_matrix.json"

    def _kept(self) -> dict:
        return json.loads(self._file.read_text()) if self._file.exists() else {}


def table(kept: dict, passed: Callable[[str, dict], bool], names: list[str], ways: tuple[str, ...]) -> str:
    """A row for each model and layout, a column for each version; a cell counts over tied, untied, MTP and ways."""
    versions = sorted(kept, key=lambda version: [int(part) for part in version.split(".")[:2]])
    rows = list(dict.fromkeys(name.rsplit("-", 2)[0] for name in names))
    notes: list[str] = []
    lines = [
        "| | " + " | ".join(f"{v} ({kept[v]['commit']})" for v in versions) + " |",
        "|---" * (len(versions) + 1) + "|",
    ]
    for row in rows:
        cells = []
        for version in versions:
            found = kept[version]["found"]
            these = {name: found.get(name) for name in names if name.rsplit("-", 2)[0] == row}
            cells.append(_cell(these, passed, ways, notes))
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    footnotes = [f"{number}. {note}" for number, note in enumerate(notes, start=1)]
    return "\n".join([*lines, "", *footnotes, ""] if footnotes else [*lines, ""])


def _cell(found: dict, passed: Callable[[str, dict], bool], ways: tuple[str, ...], notes: list[str]) -> str:
    if not any(found.values()):
        return "not run"
    asked = good = left = 0
    said: dict[str, list[str]] = {}
    for name, one in sorted(found.items()):
        which = " ".join(name.rsplit("-", 2)[1:])
        if one is not None and one["stock"]:
            said.setdefault(f"stock does not run: `{one['stock']}`", []).append(which)
            continue
        for way in ways:
            result = one.get(way) if one is not None else None
            if result is None:
                left += 1
            elif "refused" in result:
                said.setdefault(f"no {way} here: {result['refused']}", []).append(which)
            else:
                asked += 1
                good += passed(way, result)
                if not passed(way, result):
                    why = f"`{result['error']}`" if "error" in result else f"{result}"
                    said.setdefault(f"{way}: {why}", []).append(which)
    for text in said:
        if text not in notes:
            notes.append(text)
    counted = [f"{good} of {asked}"] if asked else []
    counted += [f"{left} not run"] if left else []
    marks = ", ".join(f"{notes.index(text) + 1} ({', '.join(which)})" for text, which in said.items())
    return (", ".join(counted) or "none") + (f"; note {marks}" if marks else "")
