"""CTC equals PyTorch's, and the transducer's loss a sum over all alignments."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from layerkit.ops.losses.alignment import ctc_loss, transducer_loss

RANDOM = np.random.default_rng(0)
BATCH, FRAMES, LABELS, CLASSES = 4, 9, 4, 5
LOGITS = RANDOM.normal(size=(BATCH, FRAMES, CLASSES)).astype(np.float32)
# The second row repeats labels; the last one has no frame for the blank between equal labels.
IDS = np.array([[1, 2, 3, 4], [2, 2, 1, 1], [3, 1, 2, 4], [1, 1, 3, 1]])
NUM_FRAMES, NUM_LABELS = np.array([9, 6, 5, 4]), np.array([4, 4, 0, 4])
LOGIT_PADDINGS = (np.arange(FRAMES) >= NUM_FRAMES[:, None]).astype(np.float32)
LABEL_PADDINGS = (np.arange(LABELS) >= NUM_LABELS[:, None]).astype(np.float32)


def test_ctc_equals_torch_with_its_gradient():
    torch = pytest.importorskip("torch")
    logits = torch.tensor(LOGITS, requires_grad=True)
    sizes = torch.tensor(NUM_FRAMES), torch.tensor(NUM_LABELS)
    log_probs = torch.log_softmax(logits, -1).transpose(0, 1)
    expected = torch.nn.functional.ctc_loss(log_probs, torch.tensor(IDS), *sizes, reduction="none")
    expected[:3].sum().backward()

    def ours(logits, ids):
        paddings = {"logit_paddings": LOGIT_PADDINGS, "label_paddings": LABEL_PADDINGS}
        losses, fits = ctc_loss(logits, ids, **jax.tree.map(jnp.asarray, paddings))
        return losses[:3].sum(), (losses, fits)

    run = jax.jit(jax.value_and_grad(ours, has_aux=True))
    (_, (losses, fits)), gradient = run(LOGITS, jnp.asarray(IDS))
    np.testing.assert_allclose(losses[:3], expected[:3].detach().numpy(), rtol=1e-5)
    np.testing.assert_allclose(gradient[:3], logits.grad[:3], atol=1e-5)
    np.testing.assert_array_equal(fits, np.isfinite(expected.detach().numpy()))
    assert 5e4 < losses[3] < 1e6
    # Ids of padding may have any value.
    (_, (losses, _)), _ = run(LOGITS, jnp.asarray(IDS).at[0, 0].set(CLASSES).at[2, 0].set(99))
    np.testing.assert_array_equal(np.isnan(losses), [True, False, False, False])


def brute_force(blank, label, num_frames, num_labels):
    """Sum over the places of labels in the sequence of labels and blanks before the last blank."""
    total = -np.inf
    steps = num_frames - 1 + num_labels
    for places in itertools.combinations(range(steps), num_labels):
        frame = count = 0
        score = 0.0
        for step in range(steps):
            if step in places:
                score += label[frame, count]
                count += 1
            else:
                score += blank[frame, count]
                frame += 1
        total = np.logaddexp(total, score + blank[frame, count])
    return -total


def test_transducer_sums_over_all_alignments_and_has_their_gradient():
    num_frames, num_labels = np.array([5, 4, 1, 2]), np.array([3, 0, 2, 3])
    draws = RANDOM.normal(size=(2, 4, 5, 4)).astype(np.float32) - 1.0
    blank, label = draws[0], draws[1, :, :, :3]
    loss = jax.jit(
        lambda blank, label: transducer_loss(
            blank, label, num_frames=jnp.asarray(num_frames), num_labels=jnp.asarray(num_labels)
        )
    )
    rows = zip(blank, label, num_frames, num_labels, strict=True)
    expected = [brute_force(*row) for row in rows]
    np.testing.assert_allclose(loss(blank, label), expected, rtol=1e-5)
    check_grads(loss, (blank, label), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)
