"""From the result to what people read: `terminal.render` and `html.render`."""
