"""A loaded model as the model of EleutherAI's lm-evaluation-harness.

Ids, windows, truncation and stop sequences are those of the harness' backend `hf`, so scores agree.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import tqdm

from layerkit.config.checks import require
from layerkit.errors import UserError
from layerkit_inputs.base.tokenizer_interface import first_ids
from layerkit_inputs.chat.template import ChatTemplate
from layerkit_runner.distributed.watchdog import progress
from layerkit_runner.run.model.loaded_model import LoadedModel

_GENERATION_OPTIONS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
_END = "END_OF_THE_LAST_MESSAGE "  # The space shows whether a template strips messages.


@dataclasses.dataclass(eq=False)
class HarnessModel:
    """Answers to the requests of the harness; see `lm_eval.api.model.TemplateLM`.

    Attributes:
      model: Language model with a tokenizer.
      max_length: Largest number of tokens that the model reads.
      batch_size: Largest number of rows of a batch.
      template: Template of chats; None if no task is asked in a chat.
      seed: Seed of sampled continuations.
      num_truncated: Number of requests whose context lost its beginning.
      notes: Messages to the user.
    """

    model: LoadedModel
    max_length: int
    batch_size: int
    template: ChatTemplate | None
    seed: int
    num_truncated: int = dataclasses.field(default=0, init=False)
    notes: set[str] = dataclasses.field(default_factory=set, init=False)
    backend: ClassVar = "causal"
    tokenizer_name: ClassVar = ""  # for a cache that is not used
    eot_token_id: ClassVar = None  # for `prefix_token_id` of the base class

    def __post_init__(self) -> None:
        """Initialize the base class."""
        super().__init__()

    @property
    def prefix_token_id(self) -> int:
        """Id before a text without context: that of the beginning of a text, or of the end."""
        tokens = self.model.tokenizer
        ids = [token for token in (tokens.bos_id, tokens.eos_id) if token is not None]
        expected = "one with a token that begins or ends a text, for texts without context"
        require(ids, None, "tokenizer", type(tokens).__name__, expected)
        return ids[0]

    def tok_encode(
        self, string: str, *, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Return the ids of a text, by default with those that begin a text in training."""
        ids = self.model.tokenizer.encode(string).tolist()
        return ids if add_special_tokens is False else [*first_ids(ids, self.model.tokenizer), *ids]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        """Return log p of continuations in nats, and whether greedy decoding chooses them.

        A request is a key, the ids of a context and those of its continuation.
        """
        rows = []
        for _, before, after in requests:
            room, expected = self.max_length + 1 - len(after), f"at least {len(after)}, for a text"
            require(room > 0, None, "max_length", self.max_length, expected)
            self.num_truncated += len(before) > room
            rows.append((before[-room:], after))

        def score(batch: list[Any], _: int) -> Iterable[tuple[float, bool]]:
            befores, afters = zip(*batch, strict=True)
            scores = self.model.score_ids(afters, prompts=befores)
            return [(s.log_likelihood, bool(np.all(s.is_most_likely))) for s in scores]

        return self._in_batches(score, rows)

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: object) -> list[float]:
        """Return log p of each text in nats, in windows of `max_length` tokens."""
        from lm_eval import utils

        windows, ends = [], [0]
        for request in requests:
            ids, prefix = self.tok_encode(*request.args), self.prefix_token_id
            pairs = utils.get_rolling_token_windows(ids, prefix, self.max_length, 1)
            windows += [(None, *utils.make_disjoint_window(pair)) for pair in pairs]
            ends.append(len(windows))
        log_probs = [log_prob for log_prob, _ in self._loglikelihood_tokens(windows)]
        return [sum(log_probs[a:b]) for a, b in itertools.pairwise(ends)]

    def generate_until(self, requests: Sequence[Any], **_: object) -> list[str]:
        """Return the continuation of each context up to the first of its stop sequences."""
        groups: dict[str, dict[int, Any]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), {})[index] = request.args
        texts: dict[int, str] = {}
        for group in groups.values():
            contexts, options = zip(*group.values(), strict=True)
            texts |= zip(group, self._continue(contexts, options[0]), strict=True)
        return [texts[index] for index in range(len(requests))]

    def _continue(self, contexts: Sequence[str], gen_kwargs: dict[str, Any]) -> list[str]:
        """Continue contexts; a batch ends when each of its rows has a stop sequence."""
        from lm_eval.models import utils

        tokens, options = self.model.tokenizer, dict(utils.normalize_gen_kwargs(gen_kwargs))
        if others := sorted(options.keys() - _GENERATION_OPTIONS):
            self._note(f"generation options without effect: {', '.join(others)}")
        until, room = options["until"], self.max_length - options["max_gen_toks"]
        # Decoded texts lack special tokens, so these end a continuation by their ids.
        stops = [tokens.encode(text) for text in until]
        ends = tuple(int(ids[0]) for ids in stops if len(ids) == 1 and not tokens.decode(ids))

        def cut(ids: np.ndarray) -> str:
            return utils.postprocess_generated_text(tokens.decode(ids), until, None)

        def generate(batch: list[Any], number: int) -> Iterable[str]:
            new_ids = self.model.generate_ids(
                [ids[-room:] for (ids,) in batch],
                max_new_tokens=options["max_gen_toks"],
                temperature=options.get("temperature", 1.0) if options["do_sample"] else 0.0,
                top_k=options.get("top_k") or 0,
                top_p=options.get("top_p") or 1.0,
                seed=self.seed + number,  # a context may be in several batches
                stop=lambda ids: cut(ids) != tokens.decode(ids),
                ends=ends,
            )
            return map(cut, new_ids)

        prompts = [(self.tok_encode(text),) for text in contexts]
        self.num_truncated += sum(len(ids) > room for (ids,) in prompts)
        return self._in_batches(generate, prompts)

    def apply_chat_template(
        self, chat_history: list[dict[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a chat, up to the answer to come or to the end of the last message.

        Messages of the system are left out if the template has no place for them.
        """
        assert self.template is not None
        if not add_generation_prompt:
            *before, last = chat_history
            chat_history = [*before, {**last, "content": last["content"] + _END}]
        try:
            text = self.template.render(chat_history, add_generation_prompt=add_generation_prompt)
        except UserError:
            others = [message for message in chat_history if message["role"] != "system"]
            text = self.template.render(others, add_generation_prompt=add_generation_prompt)
            self._note("messages of the system are left out; the chat template cannot render them")
        if add_generation_prompt:
            return text
        text, _, rest = text.rpartition(_END.strip())
        return text if rest.startswith(" ") else text.rstrip()

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.model.job.observers.message(f"lm_eval: {text}")
        self.notes.add(text)

    def _in_batches(self, function: Callable[..., Iterable[Any]], rows: list[Any]) -> list[Any]:
        """Return an answer to each row by a function of a batch and its number.

        Rows of similar lengths share a batch, the longest first.
        """
        order = sorted(range(len(rows)), key=lambda index: -sum(map(len, rows[index])))
        starts = tqdm.trange(0, len(order), self.batch_size, desc="batches", disable=None)
        answers: dict[int, Any] = {}
        for number, start in enumerate(starts):
            progress(f"lm_eval: {start} of {len(order)} requests", compiles=True)
            batch = order[start : start + self.batch_size]
            answers |= zip(batch, function([rows[index] for index in batch], number), strict=True)
        return [answers[index] for index in range(len(rows))]
