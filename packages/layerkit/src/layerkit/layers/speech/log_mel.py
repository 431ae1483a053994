"""LogMel, the layer that turns waveforms into log-mel features."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from layerkit.base.base_layer import BaseLayer
from layerkit.config.checks import check_non_negative, check_positive, check_sizes, require
from layerkit.config.nested_map import NestedMap
from layerkit.ops.attention.masks import first_tokens
from layerkit.ops.audio import MelScale, Window, mel_filters, mirror_ends, spectrum, split_frames


class LogMel(BaseLayer):
    """Log-mel features of waveforms, computed in float32.

    The defaults are those of `torchaudio.transforms.MelSpectrogram` with the logarithm, for 16 kHz.

    | | fields |
    |---|---|
    | Kaldi, SeamlessM4T | `input_scale=2**15, fft_length=512, low_frequency=20.0, center=False, \
preemphasis=0.97, removes_mean=True, window="povey", triangles_in_mel=True, floor=2**-23` |
    | Whisper | `mel_scale="slaney", has_unit_area=True, normalization="whisper", \
num_samples=480_000` |

    Attributes:
      sample_rate: Samples per second.
      frame_length: Samples of a frame.
      hop_length: Samples between the starts of consecutive frames.
      fft_length: Length of the Fourier transform of a frame, which is padded with zeros.
      num_bins: Number of filters.
      low_frequency: Lower end of the first filter in Hz.
      high_frequency: Upper end of the last filter in Hz; None for half of the sample rate.
      mel_scale: Scale of the filters, `htk` or `slaney`.
      has_unit_area: True for filters of equal area; see `layerkit.ops.audio.mel_filters`.
      triangles_in_mel: True for filters with straight sides on the mel scale.
      window: `hann`, `hamming`, or Kaldi's `povey`.
      power: Exponent of the magnitudes, 2.0 for energies.
      center: True to pad both ends of an utterance by half a frame of mirrored samples.
      input_scale: Factor of the samples, 2**15 for the range of 16-bit integers.
      dither: Standard deviation of the noise that training adds to the scaled samples.
      preemphasis: Part c of the sample before that is subtracted from each sample of a frame; the
        first one is multiplied by 1 - c.
      removes_mean: True to subtract the mean of each frame.
      floor: Smallest value of which a logarithm is computed.
      normalization: `none`; `utterance` for mean 0 and variance 1 of each bin over the frames of an
        utterance; `whisper` for log10 that is at most 8 below the maximum, plus 4, divided by 4,
        without the last frame.
      num_samples: Number of samples to which silence pads each utterance, whose frames are then no
        padding; None for utterances as they are.

    Raises:
      ConfigError: A number is out of range, or the frame is longer than the transform.
    """

    sample_rate: int = 16_000
    frame_length: int = 400
    hop_length: int = 160
    fft_length: int = 400
    num_bins: int = 80
    low_frequency: float = 0.0
    high_frequency: float | None = None
    mel_scale: MelScale = "htk"
    has_unit_area: bool = False
    triangles_in_mel: bool = False
    window: Window = "hann"
    power: float = 2.0
    center: bool = True
    input_scale: float = 1.0
    dither: float = 0.0
    preemphasis: float = 0.0
    removes_mean: bool = False
    floor: float = 1e-10
    normalization: Literal["none", "utterance", "whisper"] = "none"
    num_samples: int | None = None

    def setup(self) -> None:
        """Check the fields."""
        check_sizes(self, sample_rate=self.sample_rate, frame_length=self.frame_length)
        check_sizes(self, hop_length=self.hop_length, num_bins=self.num_bins)
        check_sizes(self, num_samples=self.num_samples)
        check_positive(self, power=self.power, input_scale=self.input_scale, floor=self.floor)
        check_non_negative(self, dither=self.dither, preemphasis=self.preemphasis)
        expected = f"at least frame_length={self.frame_length}"
        is_valid = self.fft_length >= self.frame_length
        require(is_valid, self, "fft_length", self.fft_length, expected)
        low, high = self._range()
        is_valid, expected = 0 <= low < high <= self.sample_rate / 2, "0 ≤ low < high ≤ rate / 2"
        require(is_valid, self, "(low_frequency, high_frequency)", (low, high), expected)

    def fprop(self, waveform: jax.Array, *, lengths: jax.Array | None = None) -> NestedMap:
        """Compute features.

        Args:
          waveform: Samples, float `[batch, samples]`, in [-1, 1].
          lengths: Number of samples of each row without padding, int32 `[batch]`; None for all.

        Returns:
          A NestedMap:
            features: `[batch, frames, num_bins]` in the compute dtype, 0 in padding.
            paddings: float32 `[batch, frames]`, 1 for frames of padding.

        Raises:
          ConfigError: Rows are longer than `num_samples`.
        """
        x = waveform.astype(jnp.float32) * self.input_scale
        if self.dither and self.is_training:
            x = x + self.dither * jax.random.normal(self.next_prng_key(), x.shape)
        if lengths is None:
            lengths = jnp.full(x.shape[:1], x.shape[1], jnp.int32)
        x = jnp.where(first_tokens(lengths, x.shape[1]), x, 0.0)
        if self.num_samples is not None:
            missing, expected = self.num_samples - x.shape[1], f"at most {self.num_samples}"
            require(missing >= 0, self, "samples of a row", x.shape[1], expected)
            x = jnp.pad(x, ((0, 0), (0, missing)))
            lengths = jnp.where(lengths > 0, self.num_samples, 0)
        half = self.frame_length // 2 if self.center else 0
        x = mirror_ends(x, lengths, size=half)
        frames = split_frames(x, frame_length=self.frame_length, hop_length=self.hop_length)
        num_frames = 1 + (lengths + 2 * half - self.frame_length) // self.hop_length
        num_frames = jnp.where(lengths > 0, num_frames, 0)
        if self.normalization == "whisper":
            frames, num_frames = frames[:, :-1], num_frames - 1
        if self.removes_mean:
            frames = frames - jnp.mean(frames, axis=-1, keepdims=True)
        if self.preemphasis:
            before = jnp.concatenate([frames[..., :1], frames[..., :-1]], axis=-1)
            frames = frames - self.preemphasis * before
        magnitudes = spectrum(frames, window=self.window, fft_length=self.fft_length)
        low, high = self._range()
        filters = mel_filters(
            self.num_bins,
            num_frequencies=magnitudes.shape[-1],
            sample_rate=self.sample_rate,
            low=low,
            high=high,
            scale=self.mel_scale,
            has_unit_area=self.has_unit_area,
            triangles_in_mel=self.triangles_in_mel,
        )
        mels = jnp.matmul(magnitudes**self.power, filters, precision="highest")
        mels = jnp.maximum(mels, self.floor)
        is_frame = first_tokens(num_frames, mels.shape[1])[..., None]
        features = jnp.where(is_frame, self._normalize(jnp.log(mels), is_frame), 0.0)
        paddings = 1.0 - is_frame[..., 0].astype(jnp.float32)
        return NestedMap(features=self.cast(features), paddings=paddings)

    def _range(self) -> tuple[float, float]:
        high = self.sample_rate / 2 if self.high_frequency is None else self.high_frequency
        return self.low_frequency, high

    def _normalize(self, features: jax.Array, is_frame: jax.Array) -> jax.Array:
        if self.normalization == "whisper":
            features = features / jnp.log(10.0)
            largest = jnp.max(features, axis=(1, 2), keepdims=True, where=is_frame, initial=-1e30)
            return (jnp.maximum(features, largest - 8.0) + 4.0) / 4.0
        if self.normalization == "utterance":
            count = jnp.sum(is_frame, axis=1, keepdims=True)
            total = jnp.sum(features, axis=1, keepdims=True, where=is_frame)
            mean = total / jnp.maximum(count, 1)
            squares = jnp.square(features - mean)
            variance = jnp.sum(squares, axis=1, keepdims=True, where=is_frame)
            variance /= jnp.maximum(count - 1, 1)
            return (features - mean) * jax.lax.rsqrt(variance + 1e-7)
        return features
