"""Does a merge of partial results give the attention over all of their keys?"""
