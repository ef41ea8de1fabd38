"""Programs that measure; the tests only try them on a small scale."""
