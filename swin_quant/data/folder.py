"""Pictures in folders, one folder a class: torchvision's ImageFolder layout."""

from pathlib import Path

from swin_quant.base.errors import SwinQuantError, listed
from swin_quant.base.files import open_plain
from swin_quant.base.progress import log
from swin_quant.data.class_names import in_order
from swin_quant.data.pictures import EXTENSIONS, MAX_BYTES, Pictures, UnreadablePicture, printable
from swin_quant.data.walk import Walk


class FolderPictures(Pictures):
    """The pictures of `<folder>/<class>/**`; a label is the index of its class folder in sorted order, as numbers if
    they count from 0 or 1, else as text.

    The rest is as in torchvision's ImageFolder, except that dot-files are skipped, a class may be empty, and a folder
    is entered once. `folder` and `root` may be links; a link below that leads out of both is not followed (`Walk`).
    Warnings name skipped files and empty classes.

    Args:
        folder: the folder of one split.
        labelled: False accepts a flat folder too; its pictures get the label -1.
        root: the data folder that holds it, if one does.

    Raises:
        SwinQuantError: nothing to read, or a folder that cannot be listed.
    """

    def __init__(self, folder: Path, labelled: bool = True, root: Path | None = None) -> None:
        self.folder = folder
        walk = Walk([folder, root or folder])
        classes, beside = walk.listed(folder)
        classes = in_order(classes)
        found = [(file, label) for label, name in enumerate(classes) for file in walk.pictures(folder / name)]
        if not found and not labelled:
            walk = Walk(walk.roots)
            found = [(file, -1) for file in walk.pictures(folder)]
        else:
            walk.leave_out(beside, " beside the folders of classes")
        if not found:
            layout, others = "<class>/<picture>" if labelled else "pictures", walk.left_out(folder)
            expected = f"found no pictures; expected {layout} with {', '.join(EXTENSIONS)}"
            raise SwinQuantError(f"{folder}: {expected}{'; ' if others else ''}{others}")
        walk.tell(folder)
        held = {label for _, label in found}
        if empty := [printable(name) for label, name in enumerate(classes) if not held & {label, -1}]:
            log.warning("%s: %d of %d classes have no picture: %s", folder, len(empty), len(classes), listed(empty))
        self._files = [Path(file).relative_to(folder).as_posix() for file, _ in found]
        self.names = [printable(file) for file in self._files]
        self.labels = [label for _, label in found]
        self.class_names = [printable(name) for name in classes]

    def open(self, index: int) -> bytes:
        """Return the bytes of one file. Raises UnreadablePicture, also for a special file, or one over 64 MiB."""
        try:
            with open_plain(self.folder / self._files[index]) as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise UnreadablePicture(f"{self.names[index]}: {error.strerror}") from error
        if len(data) > MAX_BYTES:
            raise UnreadablePicture(f"{self.names[index]}: larger than {MAX_BYTES >> 20} MiB")
        return data
