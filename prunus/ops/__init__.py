"""The few operations that must be fast, each defined in plain torch first."""
