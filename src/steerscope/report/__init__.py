"""What every HTML page is made of: the page, tables, figures, colours and small SVG plots."""
