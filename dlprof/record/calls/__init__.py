"""Where the script makes and calls what training consists of: the call sites that findings name."""
