"""rocprofv3."""
