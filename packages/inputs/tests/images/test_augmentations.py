"""Augmentations: statistics of crops, operations of RandAugment, and formulas of mixtures."""

from __future__ import annotations

import numpy as np
import pytest

from layerkit_inputs.images.augmentations import crop_box, mix, random_resized_crop
from layerkit_inputs.images.rand_augment import OPERATIONS, rand_augment

Image = pytest.importorskip("PIL.Image")


def boxes(size, *, scale, count=4000):
    random = np.random.default_rng(0)
    return np.array([crop_box(size, random, scale=scale) for _ in range(count)])


def test_crops_have_the_areas_and_ratios_of_inception():
    left, top, right, bottom = boxes((500, 500), scale=(0.08, 0.5)).T
    assert (left >= 0).all() and (top >= 0).all() and (right <= 500).all() and (bottom <= 500).all()
    area, ratio = (right - left) * (bottom - top) / 500**2, (right - left) / (bottom - top)
    assert 0.078 < area.min() < 0.09 and 0.49 < area.max() < 0.502
    assert abs(area.mean() - 0.29) < 0.01  # uniform between 0.08 and 0.5
    assert 0.745 < ratio.min() < 0.76 and 1.32 < ratio.max() < 1.34
    assert abs(np.log(ratio).mean()) < 0.01  # 3/4 and 4/3 are equally likely
    # A box is uniform among the places where it fits.
    assert abs((left / (500 - (right - left))).mean() - 0.5) < 0.02


def test_image_that_no_box_fits_is_cropped_in_its_center():
    assert (boxes((90, 9), scale=(1.0, 1.0), count=3) == [39, 0, 51, 9]).all()
    assert (boxes((9, 90), scale=(1.0, 1.0), count=3) == [0, 39, 9, 51]).all()


def test_crop_resizes_the_pixels_of_its_box():
    image = Image.fromarray(np.random.default_rng(1).integers(256, size=(40, 30), dtype=np.uint8))
    crop = random_resized_crop(image, np.random.default_rng(2), size=16, scale=(0.2, 0.9))
    left, top, right, bottom = crop_box((30, 40), np.random.default_rng(2), scale=(0.2, 0.9))
    inside = Image.fromarray(np.asarray(image)[top:bottom, left:right])
    np.testing.assert_array_equal(crop, inside.resize((16, 16), Image.BILINEAR))


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_operations_have_the_strengths_of_the_paper(mode):
    pixels = np.random.default_rng(3).integers(256, size=(20, 20, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).convert(mode)
    before = np.asarray(image).astype(int)

    def after(name, strength, sign=1):
        return np.asarray(OPERATIONS[name](image, strength, sign)).astype(int)

    np.testing.assert_array_equal(after("identity", 1), before)
    np.testing.assert_array_equal(after("posterize", 1), before // 16 * 16)
    np.testing.assert_array_equal(after("posterize", 0), before)
    np.testing.assert_array_equal(
        after("solarize", 0.4), np.where(before < 153, before, 255 - before)
    )
    np.testing.assert_allclose(after("brightness", 1), np.minimum(before * 1.9, 255), atol=1)
    np.testing.assert_allclose(after("brightness", 1, -1), before * 0.1, atol=1)
    np.testing.assert_array_equal(after("translate_x", 331 / 1500)[:, :18], before[:, 2:])
    np.testing.assert_array_equal(after("translate_y", 331 / 1500, -1)[2:], before[:18])
    assert (after("translate_x", 331 / 1500)[:, 18:] == 128).all()
    # The row n is shifted by 0.3 (n + 0.5) pixels.
    np.testing.assert_array_equal(after("shear_x", 1)[15, :15], before[15, 5:])
    np.testing.assert_array_equal(
        after("rotate", 1),
        np.asarray(image.rotate(30, fillcolor=(mode == "L" and 128) or (128,) * 3)),
    )
    for name in ("rotate", "shear_x", "shear_y", "translate_x", "color", "contrast", "sharpness"):
        np.testing.assert_array_equal(after(name, 0), before, err_msg=name)


def test_rand_augment_draws_all_operations_and_signs(monkeypatch):
    seen = set()
    for name in OPERATIONS:
        monkeypatch.setitem(
            OPERATIONS,
            name,
            lambda image, strength, sign, name=name: seen.add((name, strength, sign)),
        )
    random = np.random.default_rng(0)
    for _ in range(400):
        rand_augment(None, random, num_operations=2, magnitude=9)
    assert seen == {(name, 0.9, sign) for name in OPERATIONS for sign in (1, -1)}


def pair():
    random = np.random.default_rng(5)
    return random.random((2, 16, 12, 3), np.float32), np.float32([[1, 0, 0], [0, 0, 1]])


def test_mixup_is_the_weighted_mean_of_images_and_labels():
    images, labels = pair()
    shares = []
    for seed in range(300):
        mixed, soft = mix(
            images, labels, np.random.default_rng(seed), mixup_alpha=0.2, cutmix_alpha=None
        )
        share = soft[0, 0]
        np.testing.assert_allclose(soft, [[share, 0, 1 - share], [1 - share, 0, share]], atol=1e-6)
        np.testing.assert_allclose(mixed[0], share * images[0] + (1 - share) * images[1], atol=1e-6)
        np.testing.assert_allclose(mixed[1], share * images[1] + (1 - share) * images[0], atol=1e-6)
        shares.append(share)
    # Beta(0.2, 0.2) has the mean 1/2 and the variance 1 / (4 (2 · 0.2 + 1)) = 0.179.
    assert abs(np.mean(shares) - 0.5) < 0.06 and abs(np.var(shares) - 0.179) < 0.02


def test_cutmix_labels_are_the_shares_of_the_pixels():
    images, labels = pair()
    shares = []
    for seed in range(100):
        mixed, soft = mix(
            images, labels, np.random.default_rng(seed), mixup_alpha=None, cutmix_alpha=1.0
        )
        is_kept = (mixed[0] == images[0]).all(axis=-1)
        np.testing.assert_array_equal(mixed[0][~is_kept], images[1][~is_kept])
        np.testing.assert_array_equal(mixed[1], np.where(is_kept[..., None], images[1], images[0]))
        np.testing.assert_allclose(soft[0], [is_kept.mean(), 0, 1 - is_kept.mean()], atol=1e-6)
        rows, columns = np.flatnonzero(~is_kept.all(1)), np.flatnonzero(~is_kept.all(0))
        assert (~is_kept).sum() == len(rows) * len(columns)  # one box
        shares.append(is_kept.mean())
    assert min(shares) < 0.4 and max(shares) == 1


def test_either_mixture_is_drawn_if_both_have_an_alpha():
    images, labels = pair()
    alphas = {"mixup_alpha": 1.0, "cutmix_alpha": 1.0}
    mixed = (mix(images, labels, np.random.default_rng(seed), **alphas)[0] for seed in range(100))
    is_cut = [(pixels == images).any() for pixels in mixed]
    assert 30 < sum(is_cut) < 70
