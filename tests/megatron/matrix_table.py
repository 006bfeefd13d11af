"""What the matrix found, kept as JSON, and its table in docs/megatron.md."""

import json
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
KEPT = DOCS / "megatron_matrix.json"
PAGE = DOCS / "megatron.md"
BEGIN, END = "<!-- matrix -->", "<!-- end of matrix -->"


def keep(version: str, commit: str, name: str, found: dict) -> None:
    """Add what was found in one configuration; results of another commit of the same version are dropped."""
    kept = _kept()
    if kept.get(version, {}).get("commit") != commit:
        kept[version] = {"commit": commit, "found": {}}
    before = kept[version]["found"].get(name, {})
    kept[version]["found"][name] = found if found["stock"] else before | found
    KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def is_kept(version: str, commit: str, name: str, way: str) -> bool:
    kept = _kept().get(version, {"commit": None})
    found = kept["found"].get(name, {}) if kept["commit"] == commit else {}
    return way in found or bool(found.get("stock"))


def _kept() -> dict:
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def write(passed: Callable[[str, dict], bool], names: list[str], ways: tuple[str, ...]) -> None:
    """Put the table of all that is kept between the marks of the page."""
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    kept = json.loads(KEPT.read_text())
    PAGE.write_text(f"{before}{BEGIN}\n{table(kept, passed, names, ways)}{END}{after}")


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
