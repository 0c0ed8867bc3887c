"""Small tokenizers of the kinds that real models have, besides the byte-level BPE of ``tests.tiny``."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

TRAINING = [
    "The warranty of the kettle lasts two years. Return it within 30 days, with the receipt.",
    "You are a helpful shop assistant. Context:\n\nQuestion: how long? Answer: free above 50 euros.",
    "Return the kettle. The warranty. Two years. Two kettles, two receipts; foo bar x 123 4567",
    "退货需要在三十天内完成。 保修期为两年。",
] * 3
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@lru_cache
def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Unigram over Metaspace with byte fallback and BOS, as Llama 2's; ▁ stands for a blank."""
    raw = Tokenizer(models.Unigram())
    raw.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=["<unk>", *CONTROL, *bytes_], unk_token="<unk>", show_progress=False
    )
    raw.train_from_iterator(TRAINING, trainer)
    vocabulary = [raw.id_to_token(i) for i in range(raw.get_vocab_size())]
    pieces = [(piece, _score(piece)) for piece in vocabulary if piece not in CONTROL]
    raw = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    bos = raw.token_to_id("<|im_start|>")
    raw.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    return _wrapped(raw)


@lru_cache
def gpt2_like() -> PreTrainedTokenizerFast:
    """Byte-level BPE whose offsets leave out a token's leading blank (``trim_offsets``), as GPT-2's."""
    raw = _byte_level(nfc=False)
    raw.post_processor = processors.ByteLevel(trim_offsets=True)
    return _wrapped(raw)


@lru_cache
def normalising() -> PreTrainedTokenizerFast:
    """Byte-level BPE behind NFC and with BOS and EOS: the text that is tokenised is not the one given."""
    raw = _byte_level(nfc=True)
    raw.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|endoftext|>",
        special_tokens=[(t, raw.token_to_id(t)) for t in ("<|im_start|>", "<|endoftext|>")],
    )
    return _wrapped(raw)


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte-level": tiny_tokenizer,
    "sentencepiece-like": sentencepiece_like,
    "gpt2-like": gpt2_like,
    "normalising": normalising,
}


def _byte_level(*, nfc: bool) -> Tokenizer:
    raw = Tokenizer(models.BPE())
    if nfc:
        raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(TRAINING, trainer)
    return raw


def _score(piece: str) -> float:
    """Bytes are the last resort; longer pieces are likelier."""
    fallback = piece == "<unk>" or (piece.startswith("<0x") and len(piece) == 6)
    return -100.0 if fallback else -10.0 + 0.1 * len(piece)


def _wrapped(raw: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>" if raw.token_to_id("<unk>") is not None else "<|endoftext|>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
