"""Python helpers of dtrain's tools. shards and crc32c need numpy and h5py only; the rest needs torch."""
