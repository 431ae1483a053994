"""Log-mel spectrograms as functions of waveforms.

The filters are those of HTK (Young et al., 2006), Kaldi or Slaney's Auditory Toolbox (1998), as in
torchaudio, librosa, Kaldi and Whisper.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

MelScale = Literal["htk", "slaney"]
Window = Literal["hann", "hamming", "povey"]

# Slaney's scale is linear up to 1000 Hz, which is 15 mel, and logarithmic above.
_BREAK, _MELS, _STEP = 1000.0, 15.0, np.log(6.4) / 27.0


def hertz_to_mel(hertz: np.ndarray, scale: MelScale) -> np.ndarray:
    """Return frequencies `[...]` in Hz on a mel scale."""
    if scale == "htk":
        return 2595.0 * np.log10(1.0 + hertz / 700.0)
    above = _MELS + np.log(np.maximum(hertz, _BREAK) / _BREAK) / _STEP
    return np.where(hertz < _BREAK, hertz * _MELS / _BREAK, above)


def mel_to_hertz(mels: np.ndarray, scale: MelScale) -> np.ndarray:
    """Return frequencies `[...]` on a mel scale in Hz."""
    if scale == "htk":
        return 700.0 * (10.0 ** (mels / 2595.0) - 1.0)
    above = _BREAK * np.exp(_STEP * (np.maximum(mels, _MELS) - _MELS))
    return np.where(mels < _MELS, mels * _BREAK / _MELS, above)


def mel_filters(
    num_bins: int,
    *,
    num_frequencies: int,
    sample_rate: int,
    low: float,
    high: float,
    scale: MelScale = "htk",
    has_unit_area: bool = False,
    triangles_in_mel: bool = False,
) -> np.ndarray:
    """Return triangular filters, float32 `[num_frequencies, num_bins]`.

    Args:
      num_bins: Number of filters, whose corners are equidistant on the mel scale.
      num_frequencies: Number of frequencies of the spectrum, from 0 to sample_rate / 2.
      sample_rate: Samples per second.
      low: Lower end of the first filter in Hz.
      high: Upper end of the last filter in Hz.
      scale: Mel scale.
      has_unit_area: True to divide each filter by half its width in Hz, as Slaney and librosa do.
      triangles_in_mel: True for sides that are straight on the mel scale, as in Kaldi and Lingvo;
        False for sides that are straight in Hz, as in torchaudio and librosa.
    """
    frequencies = np.linspace(0.0, sample_rate / 2, num_frequencies)
    ends = hertz_to_mel(np.array([low, high]), scale)
    mels = np.linspace(ends[0], ends[1], num_bins + 2)
    corners = hertz_to_mel(frequencies, scale) if triangles_in_mel else frequencies
    edges = mels if triangles_in_mel else mel_to_hertz(mels, scale)
    left, center, right = edges[:-2], edges[1:-1], edges[2:]
    rising = (corners[:, None] - left) / (center - left)
    falling = (right - corners[:, None]) / (right - center)
    filters = np.maximum(0.0, np.minimum(rising, falling))
    if has_unit_area:
        hertz = mel_to_hertz(mels, scale)
        filters *= 2.0 / (hertz[2:] - hertz[:-2])
    return filters.astype(np.float32)


_WINDOWS: dict[Window, Callable[[int], np.ndarray]] = {
    "hann": lambda size: np.hanning(size + 1)[:-1],
    "hamming": lambda size: np.hamming(size + 1)[:-1],
    # Kaldi's window, which is symmetric.
    "povey": lambda size: np.hanning(size) ** 0.85,
}


def mirror_ends(waveform: jax.Array, lengths: jax.Array, *, size: int) -> jax.Array:
    """Pad both ends of utterances with their mirrored samples.

    Args:
      waveform: `[batch, samples]`.
      lengths: Number of samples of each row without padding, int32 `[batch]`.
      size: Number of samples before, and behind the last of a row.

    Returns:
      `[batch, samples + 2·size]`; what follows the padding of a row is arbitrary.
    """
    if size == 0:
        return waveform
    index = jnp.arange(-size, waveform.shape[1] + size)
    period = jnp.maximum(2 * (lengths[:, None] - 1), 1)
    index = index % period
    return jnp.take_along_axis(waveform, jnp.minimum(index, period - index), axis=1)


def split_frames(waveform: jax.Array, *, frame_length: int, hop_length: int) -> jax.Array:
    """Return the overlapping frames `[..., frames, frame_length]` of samples `[..., samples]`."""
    num_frames = 1 + (waveform.shape[-1] - frame_length) // hop_length
    starts = hop_length * np.arange(max(num_frames, 0))
    return waveform[..., starts[:, None] + np.arange(frame_length)]


def spectrum(frames: jax.Array, *, window: Window, fft_length: int) -> jax.Array:
    """Return the magnitudes of the Fourier transform of windowed frames.

    Args:
      frames: float32 `[..., frame_length]`.
      window: Window of the frames.
      fft_length: Length of the transform, for which frames are padded with zeros.

    Returns:
      float32 `[..., fft_length // 2 + 1]`.
    """
    weights = _WINDOWS[window](frames.shape[-1]).astype(np.float32)
    return jnp.abs(jnp.fft.rfft(frames * weights, n=fft_length))
