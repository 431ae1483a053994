"""Images of conversations: forms of rows, placeholders, loss, pixels, packing, laws and errors."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layerkit.config import build
from layerkit.errors import ConfigError
from layerkit_inputs import HuggingFaceTokenizer
from layerkit_inputs.base.errors import BadRecordError
from layerkit_inputs.base.host_batches import spec_of
from layerkit_inputs.chat.chat_input import ChatInput, ChatPrompts
from layerkit_inputs.chat.conversations import read_conversation
from layerkit_inputs.chat.folder_images import folder_images
from layerkit_inputs.chat.images import ChatImages, ImageSource
from layerkit_inputs.chat.preference_input import PairInput
from layerkit_inputs.testing import laws

pillow = pytest.importorskip("PIL.Image")
tokenizers = pytest.importorskip("tokenizers")

GEMMA = Path(__file__).parent / "templates" / "gemma3.jinja"
SPECIAL = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<image>"]
SPECIAL += ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
TEXT = {"type": "text", "text": "What is this?"}
ANSWER = {"role": "assistant", "content": "A picture."}


def png(number: int, size: tuple[int, int] = (6, 5)) -> bytes:
    """Return a PNG of random pixels."""
    pixels = np.random.default_rng(number).integers(256, size=(*size, 3), dtype=np.uint8)
    file = io.BytesIO()
    pillow.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def uri(number: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(number)).decode()}"


def ask(*parts: Any, **columns: Any) -> dict[str, Any]:
    """Return a row of a question with these parts and an answer."""
    return {"messages": [{"role": "user", "content": [*parts]}, ANSWER], **columns}


def image(name: str) -> dict[str, str]:
    return {"type": "image", "image": name}


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory) -> Path:
    """Return a folder with a tokenizer that merges line breaks, as that of Gemma 3."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(["user\n\n\n", "\n\n", "What is this?"] * 9, trainer)
    folder = tmp_path_factory.mktemp("gemma")
    model.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return folder


IMAGES = ChatImages(
    height=4,
    width=4,
    tokens_per_image=3,
    marker="<start_of_image>",
    placeholder="<image_soft_token>",
    before="\n\n<start_of_image>",
    after="<end_of_image>\n\n",
)


@pytest.fixture
def make(tmp_path: Path, tokenizer_file: Path) -> Callable[..., ChatInput]:
    """Return a function from rows and fields to an input of these rows."""
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(png(number))

    def make_input(rows: list[Any], kind: Any = ChatInput, **fields: Any) -> ChatInput:
        path = tmp_path / "chat.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tokenizer = HuggingFaceTokenizer(path=str(tokenizer_file))
        common: dict[str, Any] = {"batch_size": 2, "chat_template": str(GEMMA)}
        if kind is not ChatPrompts:
            common["seq_length"] = 64
        options = {"tokenizer": tokenizer, "images": IMAGES, "split": "all", **fields}
        return kind(paths=[str(path)], **{**common, **options})

    return make_input


@pytest.mark.parametrize(
    "row",
    [
        ask(image("1.png"), TEXT),
        ask({"type": "image", "path": "1.png"}, TEXT),
        ask({"type": "image_url", "image_url": {"url": uri(1)}}, TEXT),
        ask({"type": "image"}, TEXT, images=["1.png"]),
        ask({"type": "image", "text": None}, TEXT, images=[{"bytes": png(1), "path": None}]),
        {
            "image": "1.png",
            "conversations": [
                {"from": "human", "value": "<image>What is this?"},
                {"from": "gpt", "value": "A picture."},
            ],
        },
    ],
)
def test_rows_of_all_forms_have_the_same_parts_and_one_image(row):
    conversation = read_conversation(row)
    assert conversation.messages == [
        {"role": "user", "content": [image(conversation.images[0]), TEXT]},
        ANSWER,
    ]
    (name,) = conversation.images
    assert name == "1.png" or base64.b64decode(name.partition("base64,")[2]) == png(1)


@pytest.mark.parametrize(
    "row",
    [
        ask(image("https://example.org/1.png"), TEXT),
        ask({"type": "video", "video": "1.mp4"}, TEXT),
        ask({"type": "video", "video": "1.mp4", "text": ""}, TEXT),
        ask(TEXT, videos=["1.mp4"]),
        ask({"type": "image"}, TEXT),
        ask(image("1.png"), TEXT, images=["2.png"]),
        ask({"type": "image", "image": 7}, TEXT),
    ],
)
def test_urls_videos_and_other_counts_of_images_are_errors(row):
    with pytest.raises(BadRecordError):
        read_conversation(row)


@pytest.mark.slow  # It imports PyTorch.
def test_ids_and_pixels_equal_those_of_transformers(make, tokenizer_file):
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file / "tokenizer.json"),
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        extra_special_tokens={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    )
    pixels = {"size": {"height": 4, "width": 4}, "image_seq_length": 3}
    pil = transformers.models.gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil
    processor = transformers.Gemma3Processor(
        pil(**pixels), fast, GEMMA.read_text(), image_seq_length=3
    )
    row = ask(image("1.png"), TEXT, image("2.png"), {"type": "text", "text": " and this?\n"})
    batch = make([row], batch_size=1).get_next()
    opened = [pillow.open(io.BytesIO(png(number))) for number in (1, 2)]
    text = processor.apply_chat_template(row["messages"])
    expected = processor(text=text, images=[opened], add_special_tokens=False, return_tensors="np")
    ids = np.array(expected["input_ids"][0])
    np.testing.assert_array_equal(batch.labels[0][: len(ids) - 1], ids[1:])
    assert batch.images.shape == (1, 64 // 3, 4, 4, 3)
    channels_last = np.moveaxis(expected["pixel_values"], 1, -1)
    np.testing.assert_allclose(batch.images[0, :2], channels_last, atol=1e-6)
    assert not batch.images[0, 2:].any()


def test_only_the_answer_has_loss_and_a_spelled_marker_is_text(make):
    text = {"type": "text", "text": "<start_of_image><image_soft_token>?"}
    source = make([ask(image("1.png"), text)], batch_size=1, seq_length=96)
    batch, tokenizer = source.get_next(), source.tokenizer
    placeholder = IMAGES.placeholder_id(tokenizer)
    assert (batch.ids == placeholder).sum() == IMAGES.tokens_per_image
    assert tokenizer.decode(batch.labels[batch.weights == 1]).startswith("A picture.")
    assert "<image_soft_token>?" in tokenizer.decode(batch.ids[0])


def test_placeholders_of_an_answer_have_no_loss(make):
    answer = {"role": "assistant", "content": [image("2.png"), {"type": "text", "text": "Here."}]}
    row = {"messages": [{"role": "user", "content": "Draw."}, answer]}
    batch = make([row], batch_size=1).get_next()
    placeholder = IMAGES.placeholder_id(make([row]).tokenizer)
    assert (batch.labels == placeholder).sum() == 3
    assert batch.weights.any()
    assert not batch.weights[batch.labels == placeholder].any()


ROWS = [
    ask(image(f"{n % 4}.png"), TEXT, *[image(f"{m}.png") for m in range(n % 3)]) for n in range(12)
]


def test_packed_rows_hold_images_in_the_order_of_placeholders_and_at_most_max_images(make):
    limited = ChatImages(**{**{n: getattr(IMAGES, n) for n in NAMES}, "max_images": 3})
    placeholder, seen = IMAGES.placeholder_id(make(ROWS).tokenizer), []
    expected = [IMAGES.read([make_sources(row)], length=3 * 3)[0] for row in ROWS]
    source = make(ROWS, images=limited, seq_length=256)
    for batch in source.eval_batches():
        assert batch.images.shape[1] == 3
        for row, segments in enumerate(batch.segment_ids):
            num_images = (batch.ids[row] == placeholder).sum() // 3
            assert num_images <= 3
            assert not batch.images[row, num_images:].any()
            begin = 0
            for number in range(1, segments.max(initial=0) + 1):
                here = batch.ids[row][segments == number]
                count = (here == placeholder).sum() // 3
                seen.append(batch.images[row, begin : begin + count])
                begin += count
    key = lambda images: (len(images), images.tobytes())  # noqa: E731
    expected = [images[: len(row_images(row))] for images, row in zip(expected, ROWS, strict=True)]
    for one, other in zip(sorted(seen, key=key), sorted(expected, key=key), strict=True):
        np.testing.assert_array_equal(one, other)


NAMES = ("height", "width", "tokens_per_image", "marker", "placeholder", "before", "after")


def row_images(row: dict[str, Any]) -> list[str]:
    return [part["image"] for part in row["messages"][0]["content"] if part["type"] == "image"]


def make_sources(row: dict[str, Any]) -> list[Any]:
    folder = Path("unused")
    names = [uri(int(name[0])) for name in row_images(row)]
    return [IMAGES.locate(name, beside=folder, where="here") for name in names]


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize(
    ("kind", "fields"), [(ChatInput, {"is_training": True}), (ChatPrompts, {"prompt_length": 40})]
)
def test_inputs_with_images_fulfill_the_laws(law, kind, fields, make):
    law(lambda **options: make(ROWS, kind, **{**fields, **options}))


def test_blank_batch_and_prompts_and_pairs_have_images(make):
    config = ChatInput.HParams.config(
        seq_length=64, images=ChatImages.HParams.config(height=4, width=4, tokens_per_image=3)
    )
    source = make(ROWS, is_training=True)
    assert spec_of(ChatInput.blank_batch(config, 2)) == spec_of(source.get_next())
    prompts = make(ROWS[:2], ChatPrompts, prompt_length=30).get_next()
    assert prompts.images.shape == (2, 10, 4, 4, 3)
    user = ROWS[1]["messages"][0]
    pair = {"chosen": [user, ANSWER], "rejected": [user, {**ANSWER, "content": "No."}]}
    batch = make([pair], PairInput, batch_size=1).get_next()
    np.testing.assert_array_equal(batch.chosen.images, batch.rejected.images)
    assert batch.chosen.images[0, :2].any()


@pytest.mark.parametrize("name", ["missing.png", "../chat.jsonl", "/etc/hostname", "data:,abc"])
def test_files_outside_of_the_folder_and_missing_ones_name_file_and_row(make, name):
    rows = [ROWS[0], ask(image(name), TEXT)]
    with pytest.raises(BadRecordError, match=r"chat\.jsonl, line 2"):
        make(rows).get_next()
    assert make(rows, on_bad_record="skip").get_next().images[0].any()


def test_corrupt_image_names_file_and_row(make, tmp_path):
    (tmp_path / "corrupt.png").write_bytes(png(0)[:60])
    source = make([ROWS[0], ask(image("corrupt.png"), TEXT)])
    with pytest.raises(BadRecordError, match=r"chat\.jsonl, line 2") as error:
        [*source.eval_batches()]
    assert "corrupt.png" in str(error.value)


FOLDER = {
    "config": {"model_type": "gemma3", "mm_tokens_per_image": 3},
    "preprocessor_config": {
        "size": {"height": 4, "width": 4},
        "image_mean": [0.5, 0.5, 0.5],
        "resample": 2,
        "do_pan_and_scan": None,
        "rescale_factor": 0.00392156862745098,
    },
}


def write_folder(folder: Path, **changed: Any) -> str:
    for name, content in FOLDER.items():
        (folder / f"{name}.json").write_text(json.dumps(content | changed))
    return str(folder)


def test_form_of_a_folder_is_that_of_its_processor(tmp_path):
    images = build(folder_images(write_folder(tmp_path), max_images=2))
    names = (*NAMES, "mean", "std", "resampling")
    assert {n: getattr(images, n) for n in names} == {n: getattr(IMAGES, n) for n in names}
    assert images.num_images(64) == 2


def test_settings_that_transformers_5_wrote_are_the_same(tmp_path):
    expected = folder_images(write_folder(tmp_path))
    settings = (tmp_path / "preprocessor_config.json").rename(tmp_path / "processor_config.json")
    settings.write_text(json.dumps({"image_processor": FOLDER["preprocessor_config"]}))
    assert folder_images(str(tmp_path)) == expected


def test_settings_that_are_no_json_raise_with_their_file(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(BadRecordError, match=r"preprocessor_config\.json"):
        folder_images(str(tmp_path))


QWEN = {"model_type": "qwen2_5_vl", "patch_size": 4, "min_pixels": 64, "max_pixels": 8192}


def write_qwen(folder, **changed):
    for name in FOLDER:
        (folder / f"{name}.json").write_text(json.dumps(QWEN | changed))
    return str(folder)


def test_form_of_Qwen_has_a_token_for_each_square_of_patches(tmp_path):
    images = build(folder_images(write_qwen(tmp_path), image_size=(48, 80)))
    assert (images.marker, images.placeholder) == ("<|image_pad|>", "<|image_pad|>")
    assert (images.height, images.width, images.tokens_per_image) == (48, 80, 6 * 10)


@pytest.mark.slow
def test_form_of_Qwen_has_the_pixels_and_tokens_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen

    images = build(folder_images(write_qwen(tmp_path), image_size=(48, 80)))
    content = png(1, size=(50, 79))
    pixels = images.read([[ImageSource(content, "")]], length=1)[0, 0]
    sizes = {"shortest_edge": QWEN["min_pixels"], "longest_edge": QWEN["max_pixels"]}
    processor = qwen.Qwen2VLImageProcessorPil(patch_size=4, size=sizes)
    theirs = processor(pillow.open(io.BytesIO(content)), return_tensors="np")
    assert theirs["image_grid_thw"].tolist() == [[1, 48 // 4, 80 // 4]]
    assert images.tokens_per_image * 4 == len(theirs["pixel_values"])
    ours, _, _ = processor.patchify(pixels.transpose(2, 0, 1), 4, 2, 2)
    np.testing.assert_allclose(ours, theirs["pixel_values"], atol=1e-6)


@pytest.mark.parametrize("image_size", [None, (48, 84), (8, 0), (96, 96)])
def test_size_that_the_processor_of_Qwen_would_not_give_raises(tmp_path, image_size):
    with pytest.raises(ConfigError, match="image_size"):
        folder_images(write_qwen(tmp_path), image_size=image_size)


@pytest.mark.parametrize("name", ["patch_size", "merge_size"])
@pytest.mark.parametrize("value", [0, "4"])
def test_sizes_of_the_processor_of_Qwen_that_are_not_positive_raise(tmp_path, name, value):
    with pytest.raises(BadRecordError, match=name):
        folder_images(write_qwen(tmp_path, **{name: value}), image_size=(48, 80))


def test_size_of_images_that_a_processor_states_cannot_be_chosen(tmp_path):
    with pytest.raises(ConfigError, match="image_size"):
        folder_images(write_folder(tmp_path), image_size=(8, 8))


@pytest.mark.parametrize(
    "changed",
    [
        {"model_type": "llama"},
        {"do_pan_and_scan": True},
        {"do_normalize": False},
        {"size": {"shortest_edge": 4}},
        {"rescale_factor": 1.0},
        {"resample": 9},
    ],
)
def test_setting_of_a_processor_that_is_not_supported_raises(tmp_path, changed):
    with pytest.raises(ConfigError, match=next(iter(changed))):
        folder_images(write_folder(tmp_path, **changed))


@pytest.mark.parametrize(
    "fields",
    [
        {"images": None},
        {"images": ChatImages(height=4, width=4, tokens_per_image=3, placeholder="<none>")},
        {"images": ChatImages(height=4, width=4, tokens_per_image=3)},
        {"chat_template": "zephyr"},
    ],
)
def test_settings_without_images_or_with_other_markers_raise(make, fields):
    with pytest.raises(ConfigError):
        make([ask(image("1.png"), TEXT)], **fields).get_next()


def test_named_templates_write_the_marker(make):
    images = ChatImages(height=4, width=4, tokens_per_image=3)
    row = ask(image("1.png"), TEXT)
    source = make([row], batch_size=1, images=images, chat_template="zephyr")
    ids, tokenizer = source.get_next().ids[0], source.tokenizer
    (places,) = np.nonzero(ids == images.placeholder_id(tokenizer))
    assert places.tolist() == [*range(places[0], places[0] + 3)]
    assert tokenizer.decode(ids[places[-1] + 1 :]).startswith("What is this?")
