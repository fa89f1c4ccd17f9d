"""Tests of dlprof/analysis/communication/rules."""
