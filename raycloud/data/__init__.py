"""What is fed: reading and cutting data sets."""

from raycloud.data.text import Corpus, Windows, read_text, standard_library

__all__ = ["Corpus", "Windows", "read_text", "standard_library"]
