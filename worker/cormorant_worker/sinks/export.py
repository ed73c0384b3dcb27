"""Exports a dataset to Minari or Parquet. Called by `cormorant dataset export`."""

from pathlib import Path
from typing import Literal

from cormorant_worker.errors import DatasetError
from cormorant_worker.sinks.dataset import read_dataset
from cormorant_worker.sinks.reading import Exported

ExportFormat = Literal["minari", "parquet"]


def export(uri: str, target: Path, *, to: ExportFormat) -> Exported:
    """Write a dataset in another format into a new folder. Holds a few batches in memory, however long it is.

    Args:
        target: a folder that does not exist yet, or is empty.
        to: minari (HDF5 layout, opened by `minari.MinariDataset(target / "data")`) or parquet (a file a part).

    Raises:
        DatasetError: the target is not empty or cannot be written; h5py is not installed; the dataset is corrupt.
    """
    # Each format brings a library of its own.
    dataset = read_dataset(uri)
    try:
        if target.exists() and any(target.iterdir()):
            raise DatasetError(f"{target} is not empty; export into a new folder")
        target.mkdir(parents=True, exist_ok=True)
        if to == "parquet":
            from cormorant_worker.sinks.parquet import export_parquet

            return export_parquet(dataset, target)
        try:
            from cormorant_worker.sinks.minari import export_minari
        except ImportError as error:
            raise DatasetError("exporting to Minari needs h5py; install cormorant[datasets]") from error
        return export_minari(dataset, target)
    except OSError as error:
        raise DatasetError(f"{target} cannot be written: {error.strerror or error}") from error
