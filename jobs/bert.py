"""A BERT that sorts texts into classes, from scratch or from weights: the model, then the task.

Without a `data.path` the texts are made up, by a seeded generator: words without a meaning, of
which each class has some that it prefers. Real ones come as CSV, JSON lines or Parquet files, with
`train`, and `test` or `valid`, in their names.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from labelled import names_of, numbers_of
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from raycloud import Accuracy, Mean, Metric, Source, Splits, Task
from raycloud.errors import DataError

if TYPE_CHECKING:
    from raycloud.rows import Rows

PAD, START, FIRST_BYTE = 0, 1, 2  # tokens, where a byte of UTF-8 is one
LONGEST = 100  # characters of a word that is looked for in a vocabulary
HEAD = 64  # values of an attention head, in the published models
NAMES = {  # of our parts in the files of BERT
    "words": "embeddings.word_embeddings", "places": "embeddings.position_embeddings",
    "segments": "embeddings.token_type_embeddings", "norm": "embeddings.LayerNorm",
    "query": "attention.self.query", "key": "attention.self.key",
    "value": "attention.self.value", "mix": "attention.output.dense",
    "norm1": "attention.output.LayerNorm", "up": "intermediate.dense", "down": "output.dense",
    "norm2": "output.LayerNorm", "pool": "pooler.dense", "head": "classifier",
}  # fmt: skip


class Layer(nn.Module):
    """Attention and a perceptron, each normalised after it is added to its input."""

    def __init__(self, *, width: int, inner: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-12) for _ in range(2))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """Of shape (rows, length, width); `seen`, (rows, 1, 1, length), is true of no padding."""
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout)
        x = self.norm1(x + self.drop(self.mix(mixed.transpose(1, 2).flatten(2))))
        return self.norm2(x + self.drop(self.down(F.gelu(self.up(x)))))


class Bert(nn.Module):
    """Tokens of shape (rows, length) in, 0 where there is none; `outputs` values of each row out.

    Devlin, Chang, Lee and Toutanova, "BERT: pre-training of deep bidirectional transformers for
    language understanding", NAACL 2019. The first token stands for the whole text.
    """

    def __init__(self, *, words: int, length: int, width: int, inner: int, depth: int, heads: int,  # noqa: PLR0913 - its shape
                 dropout: float, outputs: int) -> None:  # fmt: skip
        super().__init__()
        if width % heads:
            raise ValueError(f"width is {width}, and no multiple of its {heads} heads")
        self.words = nn.Embedding(words, width, padding_idx=PAD)
        self.places, self.segments = nn.Embedding(length, width), nn.Embedding(2, width)
        self.norm, self.drop = nn.LayerNorm(width, eps=1e-12), nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            Layer(width=width, inner=inner, heads=heads, dropout=dropout) for _ in range(depth)
        )
        self.pool, self.head = nn.Linear(width, width), nn.Linear(width, outputs)
        self.apply(self._start)

    @staticmethod
    def _start(module: nn.Module) -> None:
        if isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.places.weight[: tokens.shape[1]] + self.segments.weight[0]
        x = self.drop(self.norm(self.words(tokens) + places))
        seen = (tokens != PAD)[:, None, None]
        for layer in self.layers:
            x = layer(x, seen)
        return self.head(self.drop(torch.tanh(self.pool(x[:, 0]))))


def name_in_file(name: str) -> str:
    """What a parameter of ours is called in the files of BERT.

    >>> name_in_file("layers.3.norm2.bias"), name_in_file("head.weight")
    ('encoder.layer.3.output.LayerNorm.bias', 'classifier.weight')
    """
    *above, part, kind = name.split(".")
    return ".".join([*(("encoder.layer", above[1]) if above else ()), NAMES[part], kind])


def weights_in(file: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, under the names of BERT without a prefix."""
    try:
        held = load_file(file)
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"the weights, settings.weights {file!r}, cannot be read: {error}",
            hint="give the model.safetensors of a BERT, in a place that each node sees",
        ) from error
    old = {"gamma": "weight", "beta": "bias"}  # of LayerNorm, in the oldest files
    return {
        f"{stem}.{old.get(kind, kind)}": tensor
        for name, tensor in held.items()
        for stem, _, kind in [name.removeprefix("bert.").rpartition(".")]
    }


def pretrained(file: str, *, heads: int | None, dropout: float, outputs: int) -> Bert:
    """A BERT of the shape and the values of a file; its `head`, if of other outputs, is fresh.

    Raises:
        DataError: The file lacks a part of BERT, or its shapes do not fit each other.
    """
    found = weights_in(file)

    def refuse(why: str) -> DataError:
        hint = "settings.weights takes BERT's own parts, by the names that its files have"
        return DataError(f"{file!r} {why}", hint=hint)

    def shape(name: str) -> tuple[int, int]:
        if name not in found or found[name].dim() == 1:
            raise refuse(f"has no matrix {name!r}")
        rows, columns = found[name].shape
        return rows, columns

    words, width = shape("embeddings.word_embeddings.weight")
    layers = {name.split(".")[2] for name in found if name.startswith("encoder.layer.")}
    model = Bert(
        words=words, length=shape("embeddings.position_embeddings.weight")[0], width=width,
        inner=shape("encoder.layer.0.intermediate.dense.weight")[0], depth=len(layers),
        heads=heads or max(1, width // HEAD), dropout=dropout, outputs=outputs,
    )  # fmt: skip
    for name, parameter in model.named_parameters():
        value = found.get(name_in_file(name))
        fits = value is not None and value.shape == parameter.shape
        if not fits and not name.startswith(("pool.", "head.")):
            have = "none" if value is None else f"one of {tuple(value.shape)}"
            raise refuse(f"has for {name_in_file(name)} {tuple(parameter.shape)} {have}")
        if fits and not parameter.is_meta:
            with torch.no_grad():
                parameter.copy_(value)
    return model


class Texts(Task):
    """What is trained: everything raycloud needs to know.

    Args:
        width: Of a token's vector. Shape and length of `weights` are those of the file.
        depth: Layers.
        heads: Of the attention; None: one for each `HEAD` values, and at least 2.
        length: Tokens of a text; what is longer is cut.
        classes: How many, where labels are numbers.
        labels: The names of the classes, or a file of them.
        weights: A safetensors file of a BERT to go on from, such as `bert-base-uncased`'s.
        vocabulary: Its file of word pieces, one a line; None: each byte is a token.
        lr: The highest rate; 2e-5 to 5e-5 is usual where there are weights.
        made_up: Texts to make where there are none.
    """

    def __init__(  # noqa: PLR0913 - each is a setting
        self, *, width: int = 64, depth: int = 2, heads: int | None = None, length: int = 128,
        classes: int = 4, labels: Sequence[str] | str | None = None, weights: str | None = None,
        vocabulary: str | None = None, dropout: float = 0.1, lr: float = 1e-3, decay: float = 0.01,
        made_up: int = 4096,
    ) -> None:  # fmt: skip
        self.labels = names_of(labels)
        self.classes = len(self.labels) or classes
        self.pieces = None if vocabulary is None else text_of(vocabulary)
        self.shape = {"width": width, "depth": depth, "inner": 4 * width}
        self.heads, self.dropout, self.weights = heads, dropout, weights
        self.length, self.lr, self.decay, self.made_up = length, lr, decay, made_up

    def model(self) -> nn.Module:
        return self.encoder(self.classes)

    def encoder(self, outputs: int) -> Bert:
        """A BERT of so many outputs, from scratch or from the weights."""
        asked = {"dropout": self.dropout, "outputs": outputs}
        words = FIRST_BYTE + 256 if self.pieces is None else len(self.pieces.splitlines())
        if self.weights is None:
            heads = self.heads or max(2, self.shape["width"] // HEAD)
            return Bert(words=words, length=self.length, heads=heads, **self.shape, **asked)
        model = pretrained(self.weights, heads=self.heads, **asked)
        for what, needs, part in (
            ("settings.length", self.length, model.places),
            ("the vocabulary's length", words, model.words),
        ):
            if needs > part.num_embeddings:
                raise DataError(
                    f"{what} is {needs}, and the weights know {part.num_embeddings}",
                    hint="give the vocabulary that came with the weights, and texts no longer",
                )
        return model

    def data(self, path: str | None) -> Splits:
        if path is None:
            asked = {"classes": self.classes, "names": self.labels}
            return Splits(
                train=topics(self.made_up, 1, **asked),
                held_out=topics(self.made_up // 4, 2, **asked),
            )
        columns = ("text", "label")
        types = {"text": "string", "label": "string" if self.labels else "int64"}
        asked = {"path": path, "columns": columns, "required": columns, "types": types}
        return Splits(
            train=Source(**asked, select=_to_train), held_out=Source(**asked, select=_to_test)
        )

    def tokens(self, texts: Sequence[str]) -> np.ndarray:
        """Of shape (texts, length), padded."""
        if self.pieces is None:
            room = self.length - 1
            rows = [[START, *(FIRST_BYTE + b for b in text.encode()[:room])] for text in texts]
        else:
            known = {piece: number for number, piece in enumerate(self.pieces.splitlines())}
            rows = [word_pieces(text, known, self.length) for text in texts]
        tokens = np.full((len(rows), self.length), PAD, np.int32)
        for place, row in enumerate(rows):
            tokens[place, : len(row)] = row
        return tokens

    def preprocess(self, rows: Rows) -> Mapping[str, Any]:
        labels = numbers_of(rows["label"], self.labels, self.classes)
        return {"tokens": self.tokens(rows["text"]), "label": labels}

    def batch(self, samples: Rows, rng: np.random.Generator | None) -> dict[str, Tensor]:
        return {
            "tokens": torch.from_numpy(shortened(samples["tokens"])).long(),
            "label": torch.from_numpy(samples["label"]),
        }

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["tokens"]), batch["label"])

    def metrics(
        self, model: nn.Module, batch: Mapping[str, Tensor], samples: int
    ) -> dict[str, Metric]:
        return measured(model(batch["tokens"]), batch["label"])

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        decays = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": decays, "weight_decay": self.decay}, {"params": others}]
        return torch.optim.AdamW(groups, self.lr, weight_decay=0.0)

    def scheduler(self, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
        """Up to the full rate in a tenth of the steps, then down to nothing, in straight lines."""

        def rate(step: int) -> float:
            done = (step + 1) / (steps + 1)
            return min(done / 0.1, (1 - done) / 0.9)

        return LambdaLR(optimizer, rate)


def measured(logits: Tensor, labels: Tensor) -> dict[str, Metric]:
    """Accuracy, and the loss of a batch of logits."""
    loss = F.cross_entropy(logits.float(), labels, reduction="sum")
    right = int((logits.argmax(1) == labels).sum())
    return {
        "accuracy": Accuracy(right=right, count=len(labels)),
        "loss": Mean(total=float(loss), weight=float(len(labels))),
    }


def shortened(tokens: np.ndarray) -> np.ndarray:
    """Without the columns at the end that are padding in each row."""
    return tokens[:, : 1 + int(np.flatnonzero((tokens != PAD).any(0)).max(initial=0))]


def text_of(file: str) -> str:
    """A vocabulary's text."""
    hint = "give the vocab.txt of a BERT, in a place that each node sees"
    try:
        text = Path(file).read_text("utf-8")
    except OSError as error:
        what = f"settings.vocabulary {file!r} cannot be read: {error.strerror}"
        raise DataError(what, hint=hint) from error
    pieces = text.splitlines()
    if pieces[:1] != ["[PAD]"] or not {"[UNK]", "[CLS]", "[SEP]"}.issubset(pieces):
        what = (
            f"settings.vocabulary {file!r} does not begin with [PAD], or lacks [UNK], [CLS], [SEP]"
        )
        raise DataError(what, hint=hint)
    return text


def word_pieces(text: str, known: Mapping[str, int], length: int) -> list[int]:
    """The tokens of a text between [CLS] and [SEP], `length` at most.

    Of each word the longest piece that is known, then the longest of what is left, which begins
    with `##`; a word that cannot be so divided is [UNK].
    """
    found: list[int] = []
    for word in split_words(text):
        if len(found) >= length - 2:
            break
        found += _pieces_of(word, known) or [known["[UNK]"]]
    return [known["[CLS]"], *found[: length - 2], known["[SEP]"]]


def _pieces_of(word: str, known: Mapping[str, int]) -> list[int]:
    """None of them: it cannot be divided."""
    pieces, start = [], 0
    while start < len(word) <= LONGEST:
        before = "##" if start else ""
        ends = (end for end in range(len(word), start, -1) if before + word[start:end] in known)
        end = next(ends, None)
        if end is None:
            return []
        pieces.append(known[before + word[start:end]])
        start = end
    return pieces


def split_words(text: str) -> list[str]:
    """Lower-case words without accents; each punctuation mark and ideograph is one by itself.

    >>> split_words("Don't sit in the café_1!")
    ['don', "'", 't', 'sit', 'in', 'the', 'cafe', '_', '1', '!']
    """
    parts = []
    for char in unicodedata.normalize("NFD", text.lower()):
        kind = unicodedata.category(char)
        if char.isspace():
            parts.append(" ")
        elif kind == "Mn" or kind.startswith("C") or char == "\ufffd":
            continue
        elif kind.startswith("P") or (char.isascii() and not char.isalnum()) or _is_ideograph(char):
            parts.append(f" {char} ")
        else:
            parts.append(char)
    return "".join(parts).split()


def _is_ideograph(char: str) -> bool:
    return "\u3400" <= char <= "\u9fff" or "\uf900" <= char <= "\ufaff" or char >= "\U00020000"


def topics(count: int, seed: int, *, classes: int, names: tuple[str, ...]) -> Source:
    """Made-up texts, of columns `text` and `label`: ten words, half of them of the class's own.

    The words are the same for each seed; each class has eight, and all share forty more.
    """
    drawn = np.random.default_rng(0)
    letters = ["".join(drawn.choice([*"abdegiklmnoprstu"], 4)) for _ in range(8 * classes + 40)]
    words = np.array(letters)
    drawn = np.random.default_rng(seed)
    labels = drawn.integers(0, classes, count)
    own = 8 * labels[:, None] + drawn.integers(0, 8, (count, 10))
    shared = 8 * classes + drawn.integers(0, 40, (count, 10))
    chosen = words[np.where(drawn.integers(0, 2, (count, 10), bool), own, shared)]
    told = [names[label] for label in labels] if names else labels
    table = pa.table({"text": [" ".join(row) for row in chosen], "label": told})
    return Source(dataset=table, key=f"topics {count}, {classes} {names}, {seed}")


def _to_train(path: str) -> bool:
    return "train" in path.rsplit("/", 1)[-1]


def _to_test(path: str) -> bool:
    return any(word in path.rsplit("/", 1)[-1] for word in ("test", "valid"))
