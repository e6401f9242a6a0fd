"""The worker process: its data set, its loop, its calibration, what it tells the driver."""
