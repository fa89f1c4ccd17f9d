"""From a result to what people read: `terminal.render` and `html.render`; `words` and `figures` serve them."""
