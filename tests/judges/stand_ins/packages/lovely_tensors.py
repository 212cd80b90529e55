"""lovely_tensors' one name that programs call: tensors print as they do."""


def monkey_patch():
    pass
