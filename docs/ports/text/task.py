"""A text classifier in the style of Hugging Face: is a line Python code, or prose about Python?"""

import pydoc
import random
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from raycloud import Splits, Task


@dataclass
class TextConfig:
    vocab_size: int = 257
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    max_position_embeddings: int = 80
    hidden_dropout_prob: float = 0.1
    num_labels: int = 2


@dataclass
class SequenceClassifierOutput:
    loss: torch.Tensor | None
    logits: torch.Tensor


class TextForSequenceClassification(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=0)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        layer = nn.TransformerEncoderLayer(
            config.hidden_size, config.num_attention_heads, 4 * config.hidden_size,
            config.hidden_dropout_prob, "gelu", batch_first=True, norm_first=True,
        )  # fmt: skip
        self.encoder = nn.TransformerEncoder(
            layer, config.num_hidden_layers, enable_nested_tensor=False
        )
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, input_ids, attention_mask, labels=None):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.word_embeddings(input_ids) + self.position_embeddings(positions)
        x = self.encoder(x, src_key_padding_mask=attention_mask == 0)
        mask = attention_mask.unsqueeze(-1)
        logits = self.classifier(self.dropout((x * mask).sum(1) / mask.sum(1)))
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=loss, logits=logits)


def load_dataset():
    """Lines that come with Python: code of its module pydoc, prose of its reference manual."""
    code = Path(pydoc.__file__).read_text().splitlines()
    prose = "\n".join(topics.values()).splitlines()
    texts = [(text, 0) for text in code] + [(text, 1) for text in prose[: len(code)]]
    features = [tokenize(text.strip()) | {"labels": label} for text, label in texts if text.strip()]
    random.Random(0).shuffle(features)
    test = len(features) // 5
    return features[test:], features[:test]


def tokenize(text, max_length=80):
    return {"input_ids": [1 + byte for byte in text.encode()[:max_length]]}


class DataCollatorWithPadding:
    def __call__(self, features):
        ids = [torch.tensor(feature["input_ids"]) for feature in features]
        input_ids = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        return {
            "input_ids": input_ids,
            "attention_mask": (input_ids != 0).long(),
            "labels": torch.tensor([feature["labels"] for feature in features]),
        }


def get_linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def factor(step):
        if step < num_warmup_steps:
            return step / num_warmup_steps
        return max(0.0, (num_training_steps - step) / (num_training_steps - num_warmup_steps))

    return LambdaLR(optimizer, factor)


class TextClassification(Task):
    def model(self):
        return TextForSequenceClassification(TextConfig())

    def data(self, path):
        return Splits(**dict(zip(("train", "held_out"), load_dataset(), strict=True)))

    def batch(self, samples, rng):
        return DataCollatorWithPadding()(samples)

    def loss(self, model, batch):
        return model(**batch).loss

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=2e-3)

    def scheduler(self, optimizer, steps):
        return get_linear_schedule_with_warmup(optimizer, 20, steps)
