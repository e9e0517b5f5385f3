"""All records of measurements: how each was made, and what of the code has changed since.

    python -m benchmarks.records
    python -m benchmarks.records --why peers

Lists each row of each record in benchmarks/results (a row is one case on one kind of CPU): commit, date, how much of
the code that ran has changed since, and the pages that quote it. With ``--why`` also the files. A row is **old** if the
changed files hold more of its code lines than its measurement tolerates; pages say so beside its figures
(``benchmarks/pages.py``). ``python -m benchmarks.renew`` measures again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.record import cpu_kind, read_rows
from benchmarks.common.terminal import argument_parser, table_of
from benchmarks.measurements import RESULTS, state_of
from benchmarks.pages import PageError, all_pages


def records() -> list[Path]:
    """Return the files of all records."""
    return sorted(path for path in RESULTS.glob("*.json") if not path.name.endswith(".raw.json"))


def quoted() -> dict[tuple[str, str, str], list[str]]:
    """Return the pages that quote each row, by record, case and CPU kind, in the order in which pages quote them."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for page in all_pages():
        try:
            page.render()
        except PageError as error:
            print(f"records: {error}", file=sys.stderr)
        for row in page.rows:
            pages = found.setdefault((row.record, row.case, row.kind), [])
            if page.path.name not in pages:
                pages.append(page.path.name)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program."""
    parser = argument_parser(__doc__, why=(False, "also list the files that changed"))
    parser.add_argument("names", nargs="*", help="records; none: all")
    args = parser.parse_args(arguments)
    pages = quoted()
    lines, reasons = [], []
    for path in records():
        if args.names and path.stem not in args.names:
            continue
        for row in read_rows(path):
            kind = cpu_kind(row["environment"]["hardware"])
            state = state_of(path.stem, row)
            lines.append(
                {
                    "record": path.stem, "case": row["case"], "CPU": kind, "date": row["time"][:10],
                    "commit": (row["environment"]["git"]["commit"] or "?")[:7],
                    "changed": f"{state.change.share:.0%}" if state.change.lines else "?",
                    "": "old" if state.is_old else "",
                    "quoted by": ", ".join(pages.get((path.stem, row["case"], kind), [])),
                }
            )  # fmt: skip
            reasons.append(f"{path.stem} {row['case']} {kind}: {state.text}")
            reasons += [f"    changed  {file}" for file in state.change.changed]
            reasons += [f"    gone     {file}" for file in state.change.gone]
    print(table_of(lines))
    if args.why:
        print("\n".join(reasons))
    return 0


if __name__ == "__main__":
    sys.exit(main())
