"""Small training scripts with one mistake each, after public reports: is the first line of a report that mistake?"""
