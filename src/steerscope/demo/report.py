def html_report(r): return ""
def telling_lines(r): return []
