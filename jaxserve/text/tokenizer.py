"""Tokenizer: text to ids and back, from a GGUF file or from a Hugging Face folder."""

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from jaxserve.text.gguf_tokenizer import WHOLE_WORDS_FIRST, build_backend
from jaxserve.text.plain_text import PlainTextEncoder, check_unicode, encode_unlocked
from jaxserve.text.token_pieces import Joiner, joiner_maker
from jaxserve.text.tokenizer_folder import read_folder
from models.errors import ModelLoadError
from models.loading.gguf import GgufFile


class Tokenizer:
    """Text to token ids and back; safe to use from several threads.

    Attributes:
      backend: the tokenizer underneath.
      special_tokens: name ("bos_token", "eos_token", ...) -> text, for chat templates.
      eos_token_ids: ids that end a sequence, none if the model declares none.
      chat_templates: name -> Jinja source; the usual one is "default".
      added_tokens: id -> what stands outside the model's own vocabulary or is matched whole.
      special_token_ids: those that `skip_special_tokens` leaves out.
      vocab_size: ids are below it; the model's embedding may have more rows.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Sequence[int] = (),
        chat_templates: Mapping[str, str] | None = None,
        add_bos: bool | None = None,
        add_eos: bool = False,
    ):
        """Wrap a tokenizer; the constructors `from_gguf` and `from_folder` read one.

        Args:
          backend: encodes and decodes; never changed.
          special_tokens: see the class.
          eos_token_ids: see the class.
          chat_templates: see the class.
          add_bos: whether `encode` puts BOS in front; None leaves it to the backend.
          add_eos: whether `encode` puts EOS at the end.

        Raises:
          ModelLoadError: the backend's decoder is of an unknown kind.
        """
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_templates = dict(chat_templates or {})
        self.added_tokens: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, t in self.added_tokens.items() if t.special)
        self.vocab_size = max(backend.get_vocab_size(), max(self.added_tokens, default=-1) + 1)
        self._added_texts = frozenset((t.content, t.special) for t in self.added_tokens.values())
        self._add_bos, self._add_eos = add_bos, add_eos
        self._joiners = joiner_maker(backend)
        self._plain_encoders: dict[frozenset[str], PlainTextEncoder] = {}
        self._tokens: dict[int, str] = {}

    @classmethod
    def from_gguf(cls, file: GgufFile, *, pre_tokenizer: str | None = None) -> "Tokenizer":
        """Build the tokenizer that a GGUF file carries.

        Args:
          file: an opened file.
          pre_tokenizer: splits text as this one of `KNOWN_PRE_TOKENIZERS` does, instead of the
            file's `tokenizer.ggml.pre`.

        Raises:
          ModelLoadError: the vocabulary is missing or inconsistent, or its kind is not known.
        """
        keys = file.metadata
        backend = build_backend(file, pre_tokenizer)
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown"}
        names |= {"pad_token": "padding"}
        ids = {name: keys.token_id(f"{key}_token_id") for name, key in names.items()}
        templates = {
            name.removeprefix("tokenizer.chat_template").lstrip(".") or "default": template
            for name in keys.values
            if re.fullmatch(r"tokenizer\.chat_template(\.\w+)?", name)
            and (template := keys.string(name)) is not None
        }
        # As in llama.cpp: these kinds begin with BOS unless the file says otherwise.
        has_bos = (pre_tokenizer or keys.string("tokenizer.ggml.pre")) in WHOLE_WORDS_FIRST
        has_bos = has_bos or keys.string("tokenizer.ggml.model") == "llama"
        declared = keys.boolean("tokenizer.ggml.add_bos_token")
        return cls(
            backend,
            special_tokens={
                name: backend.id_to_token(token_id) or ""
                for name, token_id in ids.items()
                if token_id is not None
            },
            eos_token_ids=keys.end_token_ids,
            chat_templates=templates,
            add_bos=has_bos if declared is None else declared,
            add_eos=keys.boolean("tokenizer.ggml.add_eos_token") or False,
        )

    @classmethod
    def from_folder(cls, path: str | Path, file: str = "tokenizer.json") -> "Tokenizer":
        """Read tokenizer.json and what stands beside it in a Hugging Face folder.

        Args:
          path: the folder.
          file: the name of tokenizer.json in it.

        Raises:
          ModelLoadError: a file is missing, malformed, or of an unknown kind.
        """
        found = read_folder(Path(path), file)
        return cls(
            found.backend,
            special_tokens=found.special_tokens,
            eos_token_ids=found.eos_token_ids,
            chat_templates=found.chat_templates,
            add_bos=found.add_bos,
            add_eos=found.add_eos,
        )

    @property
    def chat_template(self) -> str | None:
        """The usual chat template, None if the model has none."""
        return self.chat_templates.get("default")

    @property
    def bos_token_id(self) -> int | None:
        """The id of BOS, None if the model has none."""
        token = self.special_tokens.get("bos_token")
        return None if token is None else self.backend.token_to_id(token)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special_tokens: bool = True
    ) -> list[int]:
        """Turn text into ids.

        Args:
          text: any text.
          add_special_tokens: add BOS and EOS where the model wants them; a BOS that the text
            begins with already is not doubled.
          parse_special_tokens: let the texts of control tokens in `text` become those tokens;
            otherwise they are encoded like any other text.

        Raises:
          InvalidRequestError: the text is no valid Unicode.
        """
        check_unicode(text)
        if parse_special_tokens:
            uses_template = add_special_tokens and self._add_bos is not False
            ids = encode_unlocked(self.backend, text, add_special_tokens=uses_template)
        else:
            ids = self.plain_encoder(self.control_tokens()).encode(text)
        return self._with_special(ids) if add_special_tokens else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Turn ids into text; ids without a token are left out.

        Raises:
          OverflowError: an id is negative or does not fit 32 bits.
        """
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, its leading space kept, part of a character as U+FFFD.

        Empty for an id without a token.
        """
        token = self.vocabulary_token(token_id)
        if token is None:
            return ""
        joiner = self.make_joiner()
        joiner.prime(["a"], ["a"])
        return joiner.feed(token) + joiner.flush()

    def vocabulary_token(self, token_id: int) -> str | None:
        """A token as it stands in the vocabulary, None for an id without one."""
        token = self._tokens.get(token_id)
        if token is None:  # the backend makes a new string each time, which costs 0.6 us
            token = self.backend.id_to_token(token_id)
            if token is not None:
                self._tokens[token_id] = token
        return token

    def make_joiner(self) -> Joiner:
        """What joins the tokens of one sequence to text; see Detokenizer."""
        return self._joiners.make()

    def control_tokens(self, template: str | None = None) -> frozenset[str]:
        """Texts that only a template may turn into tokens, never the content of a message.

        These are the special tokens, and those other added tokens that the template writes
        itself ("</think>", "<tool_call>"); runs of white space are text in any case.

        Args:
          template: the chat template in use, by default the model's own ones.
        """
        templates = self.chat_templates.values() if template is None else (template,)
        return _control_tokens(self._added_texts, "\0".join(templates))

    def plain_encoder(self, control_tokens: frozenset[str]) -> PlainTextEncoder:
        """What encodes text in which these tokens are nothing but text."""
        if control_tokens not in self._plain_encoders:
            unknown = self.special_tokens.get("unk_token")
            made = PlainTextEncoder(self.backend, control_tokens, unknown)
            self._plain_encoders[control_tokens] = made
        return self._plain_encoders[control_tokens]

    def _with_special(self, ids: list[int]) -> list[int]:
        bos = self.bos_token_id if self._begins_with_bos else None
        if bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        if bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        eos = self.backend.token_to_id(self.special_tokens.get("eos_token", ""))
        if self._add_eos and eos is not None and ids[-1:] != [eos]:
            ids = [*ids, eos]
        return ids

    @functools.cached_property
    def _begins_with_bos(self) -> bool:
        if self._add_bos is not None:
            return self._add_bos
        return self.bos_token_id is not None and self.backend.encode("").ids[:1] == [
            self.bos_token_id
        ]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a GGUF file, of a Hugging Face folder or of its tokenizer.json.

    Raises:
      ModelLoadError: the path is neither, or its tokenizer is missing or refused.
    """
    path = Path(path)
    if path.is_dir():
        return Tokenizer.from_folder(path)
    if path.suffix == ".gguf":
        return Tokenizer.from_gguf(GgufFile(path))
    if path.suffix == ".json":
        return Tokenizer.from_folder(path.parent, path.name)
    raise ModelLoadError(f"{path}: tokenizer: must be a folder, a tokenizer.json or a .gguf file")


@functools.lru_cache(maxsize=16)
def _control_tokens(added: frozenset[tuple[str, bool]], templates: str) -> frozenset[str]:
    return frozenset(
        text
        for text, is_special in added
        if is_special or (not text.isspace() and text in templates)
    )
