"""Record the losses on preferences that TRL computes, and their gradients, for the tests.

It runs in an environment of its own and imports nothing of this project:

    pip install trl==1.16.0 transformers==5.23.0 torch
    python scripts/trl_reference.py packages/layerkit/tests/models/trl_reference.json

The policy and its reference are tables of the logits of the next token, `[vocab, vocab]`, so a
gradient is a small table, too. Trainers are made without their constructors, which need data sets
and folders. The methods that compute the losses are TRL's, unchanged.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import types
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import numpy as np
import torch
import trl
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer

RANDOM = np.random.default_rng(40)
VOCAB, LENGTH, IGNORED = 6, 8, -100
# Token ids of prompt and answer, and the number of tokens of each prompt.
CHOSEN = [[0, 3, 1, 4, 2], [0, 2, 5, 5], [0, 4, 1, 1, 3, 2, 5, 2]]
REJECTED = [[0, 3, 1, 5], [0, 2, 1, 3, 1, 2], [0, 4, 1, 2]]
PROMPTS = [3, 2, 3]
ANSWERS = [[0, 3, 1, 4, 2], [0, 2, 5, 5], [0, 4, 1, 1, 3, 2], [0, 5, 4]]
ANSWER_PROMPTS = [3, 2, 3, 1]
IS_DESIRABLE = [True, False, False, True]


def table(*shape):
    """Return normal numbers of few digits, which JSON holds exactly."""
    return np.round(RANDOM.normal(0.0, 1.0, shape), 3).tolist()


POLICY, REFERENCE, HEAD = table(VOCAB, VOCAB), table(VOCAB, VOCAB), table(VOCAB, 1)


class Table(torch.nn.Module):
    """A language model that predicts a token from the one before it alone."""

    is_gradient_checkpointing = False

    def __init__(self, logits):
        """Set the logits `[vocab, vocab]`."""
        super().__init__()
        self.table = torch.nn.Parameter(torch.tensor(logits, dtype=torch.float64))

    def forward(self, input_ids, labels=None, **_):
        """Return the logits of ids `[rows, length]`, and log-probabilities of the labels."""
        outputs = types.SimpleNamespace(logits=self.table[input_ids])
        if labels is not None:  # as TRL's fused head
            log_probs = torch.log_softmax(outputs.logits[:, :-1], -1)
            labels = labels[:, 1:, None]
            log_probs = log_probs.gather(2, labels.clamp(min=0))
            outputs.log_probs = torch.where(labels == IGNORED, 0.0, log_probs)[..., 0]
            outputs.entropy = outputs.mean_logits = outputs.log_probs.detach()
            outputs.is_top1 = outputs.entropy > 0
        return outputs


class Scores(Table):
    """A reward model that reads the last token of each row; 0 pads rows and starts them."""

    def __init__(self):
        """Set the hidden states and the head."""
        super().__init__(POLICY)
        self.head = torch.nn.Parameter(torch.tensor(HEAD, dtype=torch.float64))

    def forward(self, input_ids, **_):
        """Return the rewards `[rows, 1]` of ids `[rows, length]`."""
        positions = torch.arange(input_ids.shape[1]) * (input_ids != 0)
        last = input_ids.gather(1, positions.argmax(1, keepdim=True))[:, 0]
        return types.SimpleNamespace(logits=self.table[last] @ self.head)


def padded(rows):
    """Return rows of ids, int64 `[rows, LENGTH]`."""
    return torch.tensor([row + [0] * (LENGTH - len(row)) for row in rows])


def masks(rows, prompts):
    """Return 1 on the answers of rows, int64 `[rows, LENGTH]`."""
    return padded([[0] * n + [1] * (len(row) - n) for row, n in zip(rows, prompts, strict=True)])


def trainer(kind, model, **fields):
    """Return a trainer with the attributes that its losses read."""
    gather = dict.fromkeys(("gather", "gather_for_metrics"), lambda x: x)
    made = object.__new__(kind)
    vars(made).update(
        accelerator=types.SimpleNamespace(device="cpu", **gather),
        model=model,
        ref_model=Table(REFERENCE),
        args=types.SimpleNamespace(gradient_checkpointing_kwargs=None, **fields.pop("args", {})),
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
        label_smoothing=0.0,
    )
    vars(made).update(fields)
    return made


def record(model, loss):
    """Return a loss and its gradients with respect to the weights of a model."""
    loss.backward()
    gradients = {name: weight.grad.tolist() for name, weight in model.named_parameters()}
    return {"loss": loss.item(), **gradients}


def dpo(loss):
    """Record a loss of pairs with a reference."""
    model, rows = Table(POLICY), CHOSEN + REJECTED
    fields = {
        "beta": 0.3,
        "loss_types": [loss],
        "loss_weights": [1.0],
        "f_divergence_type": "reverse_kl",
        "ld_alpha": None,
        "use_weighting": False,
    }
    mask = masks(rows, 2 * PROMPTS)
    batch = {"input_ids": padded(rows), "completion_mask": mask, "attention_mask": mask}
    computed = trainer(DPOTrainer, model, **fields)._compute_loss(
        model, batch, return_outputs=False
    )
    return record(model, computed)


def without_reference(kind, prompts=PROMPTS, **fields):
    """Record a loss of pairs without a reference."""
    model, batch = Table(POLICY), {}
    for side, rows in (("chosen", CHOSEN), ("rejected", REJECTED)):
        ids, mask = padded(rows), masks(rows, prompts)
        batch[f"{side}_input_ids"] = ids
        batch[f"{side}_attention_mask"] = masks(rows, [0] * len(rows))
        batch[f"{side}_labels"] = torch.where(mask == 1, ids, IGNORED)
    more = {"is_encoder_decoder": False, "pad_token_id": 0, "padding_value": 0}
    more |= {"cpo_alpha": 0, "alpha": 0.0}
    made = trainer(kind, model, **more, **fields)
    return record(model, made.get_batch_loss_metrics(model, batch)[0])


def kto(**weights):
    """Record KTO; a mismatched row has the answer of the row before it."""
    model = Table(POLICY)
    answers = [row[n:] for row, n in zip(ANSWERS, ANSWER_PROMPTS, strict=True)]
    prompts = [row[:n] for row, n in zip(ANSWERS, ANSWER_PROMPTS, strict=True)]
    mismatched = [a + b for a, b in zip(prompts, answers[-1:] + answers[:-1], strict=True)]
    batch = {"label": torch.tensor(IS_DESIRABLE)}
    for prefix, rows in (("", ANSWERS), ("KL_", mismatched)):
        mask = masks(rows, ANSWER_PROMPTS)
        batch |= {f"{prefix}input_ids": padded(rows), f"{prefix}completion_mask": mask}
        batch[f"{prefix}attention_mask"] = mask
    made = trainer(KTOTrainer, model, loss_type="kto", beta=0.3, calculate_KL=True, **weights)
    return record(model, made._compute_loss(model, batch, return_outputs=False))


def reward(centering):
    """Record the loss of a reward model."""
    model, rows = Scores(), padded(CHOSEN + REJECTED)
    made = trainer(RewardTrainer, model, args={"center_rewards_coefficient": centering})
    return record(model, made.compute_loss(model, {"input_ids": rows, "attention_mask": rows}))


def main():
    """Write all cases to the file of the first argument."""
    cases = {
        "sigmoid": dpo("sigmoid"),
        "hinge": dpo("hinge"),
        "ipo": dpo("ipo"),
        "smoothed": without_reference(
            CPOTrainer, loss_type="sigmoid", beta=0.3, label_smoothing=0.2
        ),
        "simpo": without_reference(CPOTrainer, loss_type="simpo", beta=2.0, simpo_gamma=0.7),
        # TRL's cross-entropy is also over the prompts, so these have the first token alone.
        "orpo": without_reference(ORPOTrainer, prompts=[1, 1, 1], beta=0.3),
        "kto": kto(desirable_weight=1.0, undesirable_weight=1.0),
        "kto_weighted": kto(desirable_weight=0.7, undesirable_weight=1.6),
        "reward": reward(None),
        "reward_centered": reward(0.05),
    }
    names = ("CHOSEN", "REJECTED", "PROMPTS", "ANSWERS", "ANSWER_PROMPTS", "IS_DESIRABLE")
    inputs = {name.lower(): globals()[name] for name in (*names, "POLICY", "REFERENCE", "HEAD")}
    content = {"trl": trl.__version__, **inputs, "cases": cases}
    Path(sys.argv[1]).write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
