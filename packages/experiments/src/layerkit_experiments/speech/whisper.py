"""Fine-tuning of a Whisper model of a Hugging Face folder on recordings.

`runner --exp=speech.whisper.FineTuneWhisper --fdl.WHISPER_FOLDER=whisper-tiny`
"""

from __future__ import annotations

from typing import ClassVar

from layerkit.config import Config, target_of
from layerkit.config.checks import require
from layerkit.models import AttentionDecoderModel
from layerkit_experiments.recipes.training import TrainedExperiment, train_config
from layerkit_inputs import AudioFiles, tokenizer_config
from layerkit_runner.init_from.settings import weights_of
from layerkit_runner.step.task import SingleTask


class FineTuneWhisper(TrainedExperiment):
    """All weights of the model in WHISPER_FOLDER, on recordings of 16 kHz with transcripts."""

    tags: ClassVar[tuple[str, ...]] = ("speech", "fine_tune")

    WHISPER_FOLDER: str
    """Folder with config.json, generation_config.json, tokenizer.json and safetensors files."""
    DATA_FOLDER: str = "."
    """Folder of `train` and `heldout`, folders of recordings and transcripts."""
    LANGUAGE: str = "en"
    TASK: str = "transcribe"
    """`transcribe`, or `translate` for transcripts in English."""
    MAX_LABELS: int = 224
    """Tokens of a transcript, without the prompt and the end."""
    FPROP_DTYPE: str = "bfloat16"
    """Dtype of the computation; weights are float32."""
    PERCORE_BATCH_SIZE: float = 8.0

    LEARNING_RATE = 1e-5
    WARMUP_STEPS = 50
    MAX_STEPS = 1000
    DECODE_INTERVAL_STEPS = 500
    CHECKPOINT_EVERY_N_STEPS = 500

    def model(self) -> Config:
        """Return the config of the model in the folder.

        Raises:
          ConfigError: The folder has another kind of model, or no such language or task.
        """
        from layerkit.interop import hugging_face

        model = hugging_face.model_config(self.WHISPER_FOLDER, fprop_dtype=self.FPROP_DTYPE)
        is_speech, expected = target_of(model) is AttentionDecoderModel, "a folder of Whisper"
        require(is_speech, None, "WHISPER_FOLDER", self.WHISPER_FOLDER, expected)
        decoder = hugging_face.decoder_config(self.WHISPER_FOLDER)
        decoder.set(max_length=None, max_decode_steps=self.MAX_LABELS + 1)
        prompt = hugging_face.speech_prompt(
            self.WHISPER_FOLDER, language=self.LANGUAGE, task=self.TASK
        )
        return model.set(decoder=decoder, prompt_ids=prompt)

    def data_summary(self) -> str:
        """Return a short description of the training data."""
        return self.DATA_FOLDER

    def datasets(self) -> list[Config]:
        """Return configs of the training and the held-out recordings."""
        return [
            self._sounds("train", name="train", is_training=True),
            self._sounds("heldout", name="heldout"),
        ]

    def decode_datasets(self) -> list[Config]:
        """Return the config of the held-out recordings."""
        return [self._sounds("heldout", name="transcripts")]

    def _sounds(self, split: str, *, name: str, is_training: bool = False) -> Config:
        return AudioFiles.HParams.config(
            name=name,
            is_training=is_training,
            path=f"{self.DATA_FOLDER}/{split}",
            percore_batch_size=self.PERCORE_BATCH_SIZE,
            max_samples=self.model().frontend_tpl.num_samples,
            max_labels=self.MAX_LABELS,
            tokenizer=tokenizer_config(self.WHISPER_FOLDER),
            has_blank=False,
            skips_longer=True,
        )

    def task(self) -> Config:
        """Return the config of the task."""
        return SingleTask.HParams.config(
            name="speech",
            model=self.model(),
            train=train_config(self, self.learner()),
            initial_weights=weights_of(self.WHISPER_FOLDER),
        )
