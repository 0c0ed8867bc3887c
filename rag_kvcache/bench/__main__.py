"""``python -m rag_kvcache.bench``: prints a table, writes JSON if asked."""

from __future__ import annotations

import argparse
import json
import platform
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from rag_kvcache import Engine
from rag_kvcache.bench.ttft import Bench, Row


def main() -> None:
    """Run the benchmark."""
    args = _arguments()
    console = Console(width=None if Console().is_terminal else 120)
    engine = Engine.from_pretrained(args.model, dtype=args.dtype, max_bytes="8GB", tenant="bench")
    contexts = sorted(args.context)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows = []
    with Progress(*columns, console=console) as progress:
        for context in contexts:
            cold, decode = context == args.cold_at, context == contexts[-1]
            task = progress.add_task(f"{context} tokens", total=None)
            bench = Bench(engine, args.rounds, partial(_advance, progress, task, context))
            progress.update(task, total=bench.runs(context, cold=cold, decode=decode))
            rows.append(bench.row(context, cold=cold, decode=decode))
            progress.update(task, description=f"{context} tokens: done")
    console.print(_table(rows))
    for line in _notes(rows):
        console.print(line)
    if args.json:
        result = {**_machine(args.model, engine), "rows": [r.to_dict() for r in rows]}
        args.json.write_text(json.dumps(result, indent=2))
        console.print(f"written to {args.json}")


def _advance(progress: Progress, task: TaskID, context: int, arm: str) -> None:
    progress.update(task, advance=1, description=f"{context} tokens: {arm}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rag_kvcache.bench", description=__doc__)
    parser.add_argument("--model", default="demo", help='hub id, folder, or "demo" (default)')
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--context", type=int, nargs="+", default=[512, 1024, 2048, 4096], metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=5, help="timed runs of each kind (median is shown)")
    parser.add_argument("--cold-at", type=int, default=2048, help="context to measure with nothing cached")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    return parser.parse_args()


def _table(rows: list[Row]) -> Table:
    table = Table(title="Time to first token, medians of alternating runs", title_justify="left")
    for name in ("context", "question", "uncached", "warm", "floor", "sooner", "warm / floor"):
        table.add_column(name, justify="right")
    for r in rows:
        table.add_row(
            str(r.context_tokens),
            str(r.question_tokens),
            *(f"{s * 1e3:,.0f} ms" for s in (r.uncached_s, r.warm_s, r.floor_s)),
            f"{r.sooner:.1f} x",
            f"{r.over_floor:.2f}",
        )
    return table


def _notes(rows: list[Row]) -> list[str]:
    notes = []
    for r in rows:
        if r.cold_s and r.cold_uncached_s:
            notes.append(
                f"Nothing cached, {r.context_tokens} tokens: {r.cold_s * 1e3:,.0f} ms with storing, against "
                f"{r.cold_uncached_s * 1e3:,.0f} ms of plain generate ({r.cold_s / r.cold_uncached_s:.3f})"
            )
        if r.decode_s and r.decode_uncached_s:
            notes.append(
                f"Each further token at {r.context_tokens} tokens: {r.decode_s * 1e3:.1f} ms against "
                f"{r.decode_uncached_s * 1e3:.1f} ms of plain generate "
                f"({r.decode_s / r.decode_uncached_s:.2f})"
            )
    return notes


def _machine(model: str, engine: Engine) -> dict[str, object]:
    return {
        "model": model,
        "dtype": engine.dtype,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    main()
