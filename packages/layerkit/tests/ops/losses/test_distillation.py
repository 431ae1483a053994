"""Divergences between a student and a teacher, compared with TRL and PyTorch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layerkit.ops.losses.distillation import divergence, top_divergence, top_log_probs
from layerkit.ops.losses.softmax import weighted_mean

RANDOM = np.random.default_rng(7)
STUDENT, TEACHER = (RANDOM.normal(0, 3, (2, 5, 11)).astype(np.float32) for _ in range(2))
DIRECTION = RANDOM.normal(size=(2, 5, 11)).astype(np.float32)
WEIGHTS = (RANDOM.random((2, 5)) >= 0.3).astype(np.float32)

# (beta, temperature, loss, its derivative along DIRECTION) of GKDTrainer.generalized_jsd_loss in
# TRL 1.16, with the label -100 where WEIGHTS is 0.
TRL = [
    (0.0, 1.0, 4.0178647, 0.1794046),
    (0.0, 2.5, 1.0139407, 0.0259797),
    (0.3, 1.0, 0.4567766, 0.0194104),
    (0.3, 2.5, 0.1876094, 0.0027179),
    (0.5, 1.0, 0.5314932, 0.0201725),
    (0.5, 2.5, 0.2236571, 0.0028676),
    (1.0, 1.0, 5.1551409, 0.1623696),
    (1.0, 2.5, 1.2607048, -0.0017819),
]


def mean_divergence(student, beta, temperature, teacher=TEACHER):
    losses = divergence(student, teacher, beta=beta, temperature=temperature)
    return weighted_mean(losses, WEIGHTS)


@pytest.mark.parametrize(("beta", "temperature", "loss", "slope"), TRL)
def test_divergence_and_gradient_equal_trl(beta, temperature, loss, slope):
    run = jax.jit(lambda x: jax.value_and_grad(mean_divergence)(x, beta, temperature))
    value, gradient = run(jnp.asarray(STUDENT))
    np.testing.assert_allclose(value, loss, atol=1e-5)
    np.testing.assert_allclose(np.sum(gradient * DIRECTION), slope, atol=1e-5)


@pytest.mark.parametrize(("beta", "temperature"), [row[:2] for row in TRL])
def test_divergence_and_gradient_of_each_logit_equal_pytorch(beta, temperature):
    torch = pytest.importorskip("torch")
    student = torch.tensor(STUDENT, requires_grad=True)
    log_q, log_p = (
        torch.log_softmax(x / temperature, -1) for x in (student, torch.tensor(TEACHER))
    )
    log_m = torch.log(beta * log_p.exp() + (1 - beta) * log_q.exp())
    against = {0.0: ((log_p, log_q, 1.0),), 1.0: ((log_q, log_p, 1.0),)}.get(
        beta, ((log_p, log_m, beta), (log_q, log_m, 1 - beta))
    )
    expected = sum(w * (a.exp() * (a - b)).sum(-1) for a, b, w in against)
    ((expected * torch.tensor(WEIGHTS)).sum() / WEIGHTS.sum()).backward()
    losses = divergence(STUDENT, TEACHER, beta=beta, temperature=temperature)
    np.testing.assert_allclose(losses, expected.detach().numpy(), rtol=1e-5, atol=1e-5)
    gradient = jax.grad(mean_divergence)(jnp.asarray(STUDENT), beta, temperature)
    np.testing.assert_allclose(gradient, student.grad.numpy(), atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_all_tokens_of_teacher_equal_its_logits(beta):
    ids, log_probs = top_log_probs(TEACHER, 11, temperature=2.0)
    assert np.all(log_probs[..., -1] < -1e8)

    def of_top(student):
        return top_divergence(student, ids, log_probs, beta, 2.0).sum()

    def of_logits(student):
        return divergence(student, TEACHER, beta, 2.0).sum()

    for one, other in zip(
        *(jax.jit(jax.value_and_grad(f))(jnp.asarray(STUDENT)) for f in (of_top, of_logits)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_few_tokens_and_the_rest_are_outcomes_of_a_coarser_distribution(beta):
    ids, log_probs = top_log_probs(TEACHER, 3)
    p, q = (np.exp(np.asarray(jax.nn.log_softmax(x), np.float64)) for x in (TEACHER, STUDENT))
    order = np.argsort(-p, -1)[..., :3]
    np.testing.assert_array_equal(ids, order)
    coarse = []
    for x in (p, q):
        top = np.take_along_axis(x, order, -1)
        coarse.append(np.concatenate([top, 1 - top.sum(-1, keepdims=True)], -1))
    np.testing.assert_allclose(np.exp(log_probs), coarse[0], atol=1e-6)
    expected = divergence(*(np.log(x) for x in reversed(coarse)), beta=beta)
    losses = top_divergence(STUDENT, ids, log_probs, beta, 1.0)
    np.testing.assert_allclose(losses, expected, atol=1e-4)
    assert np.all(losses <= divergence(STUDENT, TEACHER, beta=beta) + 1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_classes_of_probability_zero_have_finite_gradients(beta):
    masked = np.where(np.arange(11) < 9, TEACHER, -np.inf)
    student = jnp.where(jnp.arange(11) < 9, STUDENT, -jnp.inf)
    value, gradient = jax.value_and_grad(mean_divergence)(student, beta, 1.0, masked)
    expected = mean_divergence(student[..., :9], beta, 1.0, TEACHER[..., :9])
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert np.isfinite(gradient[..., :9]).all()
