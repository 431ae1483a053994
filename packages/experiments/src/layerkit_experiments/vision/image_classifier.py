"""Base of image classifiers, whose images come from files or are generated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from layerkit.base.weights import WeightInit
from layerkit.config import Config
from layerkit.models import ClassificationModel
from layerkit_experiments.recipes.training import TrainedExperiment, train_config
from layerkit_experiments.vision.generated_images import GeneratedImages
from layerkit_inputs import HuggingFaceImages, ImageFolder, TfdsImages, WebDataset
from layerkit_runner.step.task import SingleTask


class ImageClassifier(TrainedExperiment, abstract=True):
    """Base of image classifiers; a subclass defines `model()`."""

    tags: ClassVar[tuple[str, ...]] = ("vision",)

    DATA_FORMAT: Literal["generated", "folder", "web_dataset", "tfds", "hugging_face"] = "generated"
    """`generated`: images that are made on demand, not augmented; `folder`: DATA_FOLDER/train and
    DATA_FOLDER/val with a folder for each class; `web_dataset`: tars of DATA_FOLDER with train and
    val in their names; `tfds`: TFDS_NAME in DATA_FOLDER, as ArrayRecord; `hugging_face`: the data
    set of DATA_FOLDER, such as Parquet files."""
    DATA_FOLDER: str = "imagenet"
    TFDS_NAME: str = "imagenet2012:5.1.0"
    """Data set with the splits train and validation, for `tfds`."""
    IMAGE_SIZE: int = 224
    NUM_CLASSES: int = 1000
    NUM_HELDOUT: int = 50_000
    """Number of images of an evaluation, for `generated`."""
    PERCORE_BATCH_SIZE: float = 64.0
    """Images per device."""
    CROP_SCALE: list[float] = [0.08, 1.0]
    """Smallest and largest area of a random crop, as a share of the image."""
    CROP_FRACTION: float = 0.875
    """Share of the shorter side that an evaluation sees."""
    FLIP: bool = True
    """Flip half of the training images left to right."""
    RAND_AUGMENT: list[float] | None = None
    """Number of operations of RandAugment and their magnitude, 0 to 10."""
    MIXUP_ALPHA: float | None = None
    CUTMIX_ALPHA: float | None = None
    NUM_DECODING_THREADS: int = 16

    reduced_fields: ClassVar[Mapping[str, Any]] = {
        "DATA_FORMAT": "generated",
        "IMAGE_SIZE": 32,
        "NUM_CLASSES": 10,
        "NUM_HELDOUT": 64,
        "PERCORE_BATCH_SIZE": 8.0,
    }

    def data_summary(self) -> str:
        """Return a short description of the training data."""
        return "generated images" if self.DATA_FORMAT == "generated" else self.DATA_FOLDER

    def datasets(self) -> list[Config]:
        """Return configs of the training and the held-out input."""
        common: dict[str, Any] = {
            "percore_batch_size": self.PERCORE_BATCH_SIZE,
            "image_size": self.IMAGE_SIZE,
            "num_classes": self.NUM_CLASSES,
        }
        if self.DATA_FORMAT == "generated":
            held_out = GeneratedImages.HParams.config(num_examples=self.NUM_HELDOUT, **common)
            train = GeneratedImages.HParams.config(is_training=True, **common)
        else:
            common["crop_fraction"] = self.CROP_FRACTION
            common["num_threads"] = self.NUM_DECODING_THREADS
            held_out = self._files("val", **common)
            train = self._files(
                "train",
                is_training=True,
                crop_scale=self.CROP_SCALE,
                flip=self.FLIP,
                rand_augment=self.RAND_AUGMENT,
                mixup_alpha=self.MIXUP_ALPHA,
                cutmix_alpha=self.CUTMIX_ALPHA,
                **common,
            )
        return [train.set(name="train"), held_out.set(name="heldout")]

    def _files(self, split: str, **fields: Any) -> Config:
        """Return the config of the reader of a split, `train` or `val`, by DATA_FORMAT."""
        folder = self.DATA_FOLDER
        if self.DATA_FORMAT == "folder":
            return ImageFolder.HParams.config(folder=f"{folder}/{split}", **fields)
        if self.DATA_FORMAT == "web_dataset":
            return WebDataset.HParams.config(paths=[f"{folder}/*{split}*.tar"], **fields)
        fields["split"] = "validation" if split == "val" else split
        if self.DATA_FORMAT == "tfds":
            return TfdsImages.HParams.config(data_set=self.TFDS_NAME, folder=folder, **fields)
        return HuggingFaceImages.HParams.config(path=folder, **fields)

    def model(self) -> Config:
        """Return the config of the ClassificationModel."""
        raise NotImplementedError

    def classify(self, network: Config, features: int) -> Config:
        """Return the config of the ClassificationModel of a network with `features` outputs."""
        model = ClassificationModel.HParams.config(network_tpl=network, top_k=5)
        model.softmax_tpl.set(
            input_dims=features,
            num_classes=self.NUM_CLASSES,
            weight_init=WeightInit.Gaussian(0.01),
        )
        return model

    def task(self) -> Config:
        """Return the config of the task."""
        return SingleTask.HParams.config(
            name="imagenet", model=self.model(), train=train_config(self, self.learner())
        )
