"""The demo's result as a table and a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.markup import escape
from rich.table import Table

from rag_kvcache.demo.compare import Row


def make_table(rows: Sequence[Row]) -> Table:
    """One line per question."""
    table = Table(
        title="The same questions, without and with reuse", title_justify="left", row_styles=("", "dim")
    )
    table.add_column("question", ratio=3)
    table.add_column("retrieved documents", ratio=2)
    table.add_column("cached /\nprefilled", justify="right", no_wrap=True)
    table.add_column("TTFT\noff", justify="right", no_wrap=True)
    table.add_column("TTFT\non", justify="right", no_wrap=True)
    table.add_column("times\nsooner", justify="right", no_wrap=True)
    table.add_column("same\ntext", justify="center", no_wrap=True)
    for row in rows:
        table.add_row(
            escape(row.question),
            escape("\n".join(row.documents)),
            f"{row.on.cached} / {row.on.prefilled}",
            f"{row.off.ttft_s:.2f} s",
            f"{row.on.ttft_s:.2f} s",
            f"[bold green]{row.ratio:.1f}[/]" if row.all_cached else f"{row.ratio:.1f}",
            "yes" if row.identical else "[bold red]NO[/]",
        )
    return table


def summarise(rows: Sequence[Row]) -> str:
    """What the table shows, in two sentences at most."""
    same = sum(row.identical for row in rows)
    texts = f"{same} of {len(rows)} texts are identical."
    warm = [row for row in rows if row.all_cached]
    if not warm:
        return f"No question found all its documents in the cache. {texts}"
    return (
        f"{len(warm)} of {len(rows)} questions found all their documents in the cache: their first token "
        f"came {median(row.ratio for row in warm):.1f} times sooner (median). {texts}"
    )
