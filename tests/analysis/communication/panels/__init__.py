"""Tests of dlprof/analysis/communication/panels."""
