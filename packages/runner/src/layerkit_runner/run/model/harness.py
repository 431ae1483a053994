"""A loaded model as the model of EleutherAI's lm-evaluation-harness.

Ids, windows, truncation and stop sequences are those of the harness' backend `hf`, so scores agree.
Batches hold requests of similar lengths, and the loaded model rounds their shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import tqdm

from layerkit.errors import UserError
from layerkit_inputs.base.tokenizer_interface import first_ids
from layerkit_runner.distributed.watchdog import progress
from layerkit_runner.errors import UsageError

if TYPE_CHECKING:
    from layerkit_inputs.chat.template import ChatTemplate
    from layerkit_runner.run.model.loaded_model import LoadedModel

_GENERATION_OPTIONS = {"do_sample", "temperature", "top_k", "top_p"}


@dataclasses.dataclass(eq=False)
class HarnessModel:
    """Answers to the requests of the harness; see `lm_eval.api.model.TemplateLM`.

    Attributes:
      model: Language model with a tokenizer.
      max_length: Largest number of tokens that the model reads.
      batch_size: Largest number of rows of a batch.
      chat_template_name: Template of chats; None for that of the experiment or tokenizer.
      seed: Seed of sampled continuations.
      num_truncated: Number of requests whose context lost its beginning.
    """

    model: LoadedModel
    max_length: int
    batch_size: int
    chat_template_name: str | None = None
    seed: int = 0
    num_truncated: int = dataclasses.field(default=0, init=False)
    backend: ClassVar = "causal"
    tokenizer_name: ClassVar = ""  # for a cache that is not used

    def __post_init__(self) -> None:
        """Initialize the base class."""
        super().__init__()

    @property
    def eot_token_id(self) -> int | None:
        """Id of the end of a text."""
        return self.model.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Id before a text without context: that of the beginning of a text, or of the end."""
        tokens = self.model.tokenizer
        token_id = tokens.eos_id if tokens.bos_id is None else tokens.bos_id
        if token_id is None:
            expected = "one with a token that begins or ends a text, for texts without context"
            raise UsageError(field="tokenizer", value=type(tokens).__name__, expected=expected)
        return token_id

    def tok_encode(
        self, string: str, *, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Return the ids of a text, by default with those that begin a text in training."""
        ids = self.model.tokenizer.encode(string).tolist()
        return ids if add_special_tokens is False else [*first_ids(ids, self.model.tokenizer), *ids]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: object
    ) -> list[tuple[float, bool]]:
        """Return log p of each continuation in nats, and whether greedy decoding chooses it.

        A request is a key, the ids of a context and those of its continuation.
        """
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        rows = []
        for _, before, after in requests:
            room = self.max_length + 1 - len(after)
            if room <= 0:
                expected = f"at least {len(after)}, the tokens of an answer"
                raise UsageError(field="max_length", value=self.max_length, expected=expected)
            self.num_truncated += len(before) > room
            rows.append((before[-room:], after))
        for batch in self._batches([len(before) + len(after) for before, after in rows], "scored"):
            befores, afters = zip(*(rows[index] for index in batch), strict=True)
            scores = self.model.score_ids(afters, prompts=befores)
            for index, score in zip(batch, scores, strict=True):
                answers[index] = (score.log_likelihood, bool(np.all(score.is_most_likely)))
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: object) -> list[float]:
        """Return log p of each text in nats, in windows of `max_length` tokens."""
        from lm_eval import utils

        windows: list[tuple[None, list[int], list[int]]] = []
        ends = [0]
        for request in requests:
            pairs = utils.get_rolling_token_windows(
                self.tok_encode(*request.args), self.prefix_token_id, self.max_length, 1
            )
            windows += [(None, *utils.make_disjoint_window(pair)) for pair in pairs]
            ends.append(len(windows))
        log_probs = [log_prob for log_prob, _ in self._loglikelihood_tokens(windows)]
        return [sum(log_probs[a:b]) for a, b in itertools.pairwise(ends)]

    def generate_until(self, requests: Sequence[Any], **_: object) -> list[str]:
        """Return the continuation of each context up to the first of its stop sequences."""
        from lm_eval.models import utils

        texts = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(index)
        for members in groups.values():
            options: dict[str, Any] = dict(utils.normalize_gen_kwargs(requests[members[0]].args[1]))
            until = utils.handle_stop_sequences(options.pop("until"), eos=None)
            contexts = [self.tok_encode(requests[index].args[0]) for index in members]
            new_ids = self._continue(contexts, until, **options)
            for index, ids in zip(members, new_ids, strict=True):
                text = self.model.tokenizer.decode(ids)
                texts[index] = utils.postprocess_generated_text(text, until, None)
        return texts

    def _continue(
        self, contexts: list[list[int]], until: Sequence[str], *, max_gen_toks: int, **options: Any
    ) -> list[np.ndarray]:
        """Continue contexts; a batch ends when each of its rows has a text of `until`."""
        room = self.max_length - max_gen_toks
        if room <= 0:
            expected = f"more than the {max_gen_toks} new tokens of a task (max_gen_toks)"
            raise UsageError(field="max_length", value=self.max_length, expected=expected)
        if others := sorted(options.keys() - _GENERATION_OPTIONS):
            text = f"lm_eval: generation options without effect: {', '.join(others)}"
            self.model.job.observers.message(text)
        self.num_truncated += sum(len(ids) > room for ids in contexts)

        def stop(ids: np.ndarray) -> bool:
            text = self.model.tokenizer.decode(ids)
            return any(end in text for end in until if end)

        new_ids: list[np.ndarray] = [np.zeros(0, np.int32)] * len(contexts)
        for number, batch in enumerate(self._batches(list(map(len, contexts)), "continued")):
            tails = self.model.generate_ids(
                [contexts[index][-room:] for index in batch],
                max_new_tokens=max_gen_toks,
                temperature=options.get("temperature", 1.0) if options["do_sample"] else 0.0,
                top_k=options.get("top_k") or 0,
                top_p=options.get("top_p") or 1.0,
                seed=self.seed + number,  # a context may be in several batches
                stop=stop,
            )
            for index, tail in zip(batch, tails, strict=True):
                new_ids[index] = tail
        return new_ids

    def apply_chat_template(
        self, chat_history: list[dict[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a chat, up to the answer to come or to the end of the last message.

        Messages of the system are left out if the template has no place for them.
        """
        try:
            text = self._template.render(chat_history, add_generation_prompt=add_generation_prompt)
        except UserError:
            others = [message for message in chat_history if message["role"] != "system"]
            text = self._template.render(others, add_generation_prompt=add_generation_prompt)
        last = chat_history[-1]["content"].strip()
        return text if add_generation_prompt else text[: text.rindex(last) + len(last)]

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        from layerkit_inputs.chat.template import load_chat_template

        job, tokens = self.model.job, self.model.tokenizer
        if not hasattr(tokens, "encode_with_offsets"):
            text = "lm_eval: special tokens that the chat template writes are encoded as text"
            job.observers.message(text)
        name = self.chat_template_name or job.resolved.experiment.chat_template()
        return load_chat_template(name, tokens)

    def _batches(self, lengths: Sequence[int], done: str) -> Iterator[list[int]]:
        """Yield the numbers of the rows of each batch, the longest rows first."""
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        # Without a terminal, there is no bar.
        with tqdm.tqdm(total=len(order), desc=f"requests {done}", disable=None) as bar:
            for start in range(0, len(order), self.batch_size):
                progress(f"lm_eval: {done} {start} of {len(order)} requests", compiles=True)
                batch = order[start : start + self.batch_size]
                yield batch
                bar.update(len(batch))


def as_harness_model(model: LoadedModel, **options: Any) -> Any:
    """Return a `HarnessModel` that is an instance of the harness' own class of models."""
    from lm_eval.api.model import TemplateLM

    return type("LayerkitModel", (HarnessModel, TemplateLM), {})(model, **options)
