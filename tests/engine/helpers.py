"""What the engine's tests share: documents, looking into the cache, plain transformers for comparison."""

from __future__ import annotations

from typing import Any

import torch

from rag_kvcache import Document, Engine, Generation
from rag_kvcache.tiers import Entry

KETTLE = Document(
    "The kettle holds 1.7 litres and boils in four minutes. Its warranty lasts two years from the day of "
    "purchase; keep the receipt. Descale it once a month.",
    id="kettle",
)
RETURNS = Document(
    "Return any item within 30 days, with the receipt. We refund the price, not the shipping. Opened food "
    "cannot be returned.",
    id="returns",
)
CHINESE = Document("退货需要在三十天内完成，并附上收据。保修期为两年，从购买之日起计算。", id="退货")


def entries(engine: Engine) -> list[Entry]:
    """Everything the engine has cached."""
    found: list[Entry] = []
    engine._memory.levels.discard(lambda e: found.append(e) is not None)
    return found


def held_bytes(engine: Engine) -> int:
    """Bytes of KV really held, counted by storage."""
    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
        for e in entries(engine)
        for p in e.planes
    }
    return sum(storages.values())


def plain(engine: Engine, prompt: Any, max_new_tokens: int) -> str:
    """What transformers alone answers: its own tokenisation, its own cache, greedy."""
    tokenizer, model = engine.tokenizer, engine.model
    if isinstance(prompt, str):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
    else:
        text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def reused(generation: Generation, kind: str = "document") -> float:
    """Share of a kind's tokens that came from the cache."""
    segments = list(generation.report.of_kind(kind))
    return sum(s.reused for s in segments) / max(1, sum(s.tokens for s in segments))
