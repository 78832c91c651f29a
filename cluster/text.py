"""Text to token ids and back, on the tokenizers library alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from tokenizers import Tokenizer

from orcaserve.cluster.model_info import BadModel
from orcaserve.cluster.text_decoder import TextDecoder, WholeTexts

# 4,096 characters of English take about 1 ms; more than that is worth a thread (the library lets the lock go).
_INLINE_CHARS = 4096


class TextCodec:
    """The model's tokenizer, and what is worth knowing about its vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenize")
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = {token_id: token.content for token_id, token in added.items() if token.special}
        self._added_ids = {token_id: token.content for token_id, token in added.items()}
        self.longest_token_chars = max(map(len, tokenizer.get_vocab()), default=1)
        how = json.loads(tokenizer.to_str()).get("decoder")
        self._is_byte_level = '"ByteLevel"' in json.dumps(how)
        self._byte_of = _byte_level_alphabet() if self._is_byte_level else {}
        self.token_text = lru_cache(maxsize=65_536)(self._token_text)
        # Where a text is its tokens' bytes and nothing else, a token of whole characters is the same in any company.
        self._whole_texts = WholeTexts(self._whole_text) if (how or {}).get("type") == "ByteLevel" else None

    @classmethod
    def from_file(cls, tokenizer_file: str) -> TextCodec:
        """Reads a tokenizer.json. Raises BadModel."""
        try:
            return cls(Tokenizer.from_file(tokenizer_file))
        except Exception as error:  # noqa: BLE001 (the library raises no narrower one)
            raise BadModel(f"{tokenizer_file}: {error}") from None

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text. Long ones are encoded on a thread, so that the event loop goes on."""
        if sum(map(len, texts)) <= _INLINE_CHARS:
            return self.encode_now(texts, add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.encode_now, texts, add_special_tokens)

    def encode_now(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text, on this thread."""
        return [self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids for text in texts]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of these ids."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def decoder(
        self,
        prompt_token_ids: Sequence[int],
        stops: Sequence[str],
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> TextDecoder:
        """Turns one choice's tokens into text as they come."""
        # Byte-level vocabularies spell a token the same way wherever it stands; the others drop the space before a
        # text's first token, unless they see what went before.
        context = [] if self._is_byte_level else list(prompt_token_ids[-6:])
        return TextDecoder(
            self.tokenizer,
            self.special_ids,
            stops,
            include_stop=include_stop,
            skip_special_tokens=skip_special_tokens,
            min_tokens=min_tokens,
            context=context,
            whole_texts=self._whole_texts,
        )

    def special_id_of(self, text: str) -> int | None:
        """The special token that is spelled so, if there is one."""
        return next((token_id for token_id, content in self.special_ids.items() if content == text), None)

    def _token_text(self, token_id: int) -> tuple[str, bytes]:
        """One token on its own: what to print for it, and its bytes. Part of a character prints as bytes:\\x.."""
        raw = self._token_bytes(token_id)
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def _whole_text(self, token_id: int) -> str:
        token = self.tokenizer.id_to_token(token_id)
        if token is None or token_id in self._added_ids or not all(c in self._byte_of for c in token):
            return ""
        text = bytes(self._byte_of[c] for c in token).decode(errors="replace")
        return "" if "\ufffd" in text else text

    def _token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added_ids:
            return self._added_ids[token_id].encode()
        token = self.tokenizer.id_to_token(token_id)
        if token is None:  # a padding row of the embedding, which no text uses
            return b""
        if self._is_byte_level and all(c in self._byte_of for c in token):
            return bytes(self._byte_of[c] for c in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-ins for the 256 bytes in byte-level vocabularies (GPT-2): visible Latin-1 characters stand
    for themselves, the other bytes for U+0100 and up, in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in visible}
    others = [byte for byte in range(256) if byte not in set(visible)]
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}
