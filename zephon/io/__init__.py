"""Storage of rows: which files make a dataset, how many rows they have, and how any row is read.

    files.py         a path, a glob or a list of them -> files in a fixed order, with relative names
    dataset.py       Dataset: rows numbered over all shards; read, locate, exclude, fingerprint
    formats.py       the contract of a format; one format a file: jsonl.py, parquet.py, memory.py
    jsonl_index.py   where the rows of a JSONL file start
    index_cache.py   keeps such an index between runs
    lru.py           what a process keeps open

Importing this package loads neither pyarrow nor torch.
"""

from zephon.errors import ShardError
from zephon.io.dataset import Dataset
from zephon.io.formats import Format, Shard, Unreadable

__all__ = ["Dataset", "Format", "Shard", "ShardError", "Unreadable"]
