"""What is fed: files into blocks, cached by content; rows out of them by id."""

from raycloud.data.text import Corpus, Windows, standard_library, text_sources

__all__ = ["Corpus", "Windows", "standard_library", "text_sources"]
