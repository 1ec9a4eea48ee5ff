"""The emulated NPU and XRT's classes on it; `tilefuse.emulator.xrt` puts them together."""
