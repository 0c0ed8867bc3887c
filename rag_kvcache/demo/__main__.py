"""``python -m rag_kvcache.demo``: the main job on a real model and real text."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from rag_kvcache.errors import MissingExtraError, RagKVCacheError

_NEXT = (
    "Next: in your own chain, make the model with "
    '[bold]ChatRAGKVCache.from_model_id("your/model")[/] and leave the rest as it is. '
    "[bold]--model your/model[/] runs this demo on another model, [bold]--answers[/] prints the texts. "
    "The demo model is tiny and answers badly; reuse changes when an answer comes, not what it says."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    options = _parser().parse_args(arguments)
    console = Console()
    try:
        _run(options, console)
    except RagKVCacheError as e:
        console.print(f"[bold red]The demo cannot run:[/] {e}", highlight=False, markup=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rag_kvcache.demo",
        description="Ask a shop's support desk the same questions without and with KV-cache reuse.",
    )
    parser.add_argument(
        "--model", default="demo", help="hub id or local folder (default: SmolLM2-135M-Instruct from PyPI)"
    )
    parser.add_argument(
        "--max-new-tokens", type=_positive, default=16, help="tokens per answer (default: 16)"
    )
    parser.add_argument("--documents", type=_positive, default=2, help="documents per question (default: 2)")
    parser.add_argument("--questions", type=_positive, help="ask only the first so many questions")
    parser.add_argument("--answers", action="store_true", help="print the answers as well")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _run(options: argparse.Namespace, console: Console) -> None:
    # Threads that wait should sleep: where another program takes one of few cores, spinning makes the
    # model ten times slower. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if options.model == "demo":
        # Nothing is downloaded, so these bars would only tell of a second's work.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        from langchain_rag_kvcache import ChatRAGKVCache
        from rag_kvcache.demo.chain import SentenceEmbeddings, make_chain, make_retriever
    except ModuleNotFoundError as e:
        if e.name is None or not e.name.startswith("langchain_core"):
            raise
        raise MissingExtraError("langchain-core", "demo") from e

    from rag_kvcache.demo.compare import compare
    from rag_kvcache.demo.corpus import load_articles, load_questions
    from rag_kvcache.demo.table import make_table, summarise
    from rag_kvcache.engine import Engine
    from rag_kvcache.model.demo import demo_embedding_folder, demo_model_folder

    articles, questions = load_articles(), load_questions()[: options.questions]
    with _progress(console) as progress:
        if options.model == "demo":
            task = progress.add_task("demo model (converted once)", total=None)
            demo_model_folder(
                lambda what, done, total: progress.update(
                    task, description=f"demo model: {what}", completed=done, total=total
                )
            )
            progress.update(task, description="demo model: ready", completed=1, total=1)
        task = progress.add_task(f"indexing {len(articles)} articles", total=1)
        retriever = make_retriever(articles, SentenceEmbeddings(demo_embedding_folder()), options.documents)
        progress.update(task, completed=1)
        task = progress.add_task("loading the model", total=1)
        engine = Engine.from_pretrained(options.model)
        progress.update(task, completed=1)

        with engine:
            llm = ChatRAGKVCache(engine=engine, max_new_tokens=options.max_new_tokens, temperature=0)
            task = progress.add_task("asking, reuse off and on", total=2 * len(questions))
            engine.generate("Good morning.", max_new_tokens=2, reuse="off")  # the first call of torch is slow
            rows = compare(
                questions,
                off=make_chain(retriever, llm.bind(reuse="off")),
                on=make_chain(retriever, llm),
                documents=lambda question: tuple(str(d.id) for d in retriever.invoke(question)),
                done=lambda: progress.advance(task),
            )
    console.print(make_table(rows))
    if options.answers:
        for row in rows:
            console.print(f"[bold]{row.question}[/]\n  {row.on.text}", highlight=False)
    console.print(summarise(rows), highlight=False)
    console.print(_NEXT, highlight=False)


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


if __name__ == "__main__":
    sys.exit(main())
