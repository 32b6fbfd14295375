"""The truth to compare with, and kits that find faults: for tests and for `zephon verify`."""
