"""Batches on a device: `Pipeline.to_device`. Nothing here imports torch before it is used."""
