"""The console in a real Chromium, beside a real router: `make console`."""
