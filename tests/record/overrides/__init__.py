"""The settings of --set inside a rank."""
