"""Charts as inline SVG and HTML, and the self-contained page around them: no library in the browser, no network."""
