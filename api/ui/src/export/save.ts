/** Saves files through the browser. */

const SHARP = 2; // pixels of a picture for each pixel of the figure
const MOST = 16_000; // pixels in each direction: the limit of browsers' canvases
const KEPT_MS = 10_000;

export function saveBlob(blob: Blob, name: string): void {
  const address = URL.createObjectURL(blob);
  Object.assign(document.createElement("a"), { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), KEPT_MS);
}

export const csvBlob = (parts: readonly string[]): Blob => new Blob([...parts], { type: "text/csv;charset=utf-8" });

export const svgBlob = (svg: string): Blob => new Blob([svg], { type: "image/svg+xml" });

/** A figure as a picture: the browser draws it from the figure's own text, so that both look the same. */
export async function pngBlob(svg: string): Promise<Blob> {
  const address = URL.createObjectURL(svgBlob(svg));
  try {
    const image = new Image();
    image.src = address;
    await image.decode();
    const scale = Math.min(SHARP, MOST / image.naturalWidth, MOST / image.naturalHeight);
    const canvas = Object.assign(document.createElement("canvas"), { width: Math.round(image.naturalWidth * scale), height: Math.round(image.naturalHeight * scale) });
    canvas.getContext("2d")?.drawImage(image, 0, 0, canvas.width, canvas.height);
    const made = await new Promise<Blob | null>((tell) => canvas.toBlob(tell, "image/png"));
    if (!made) throw new Error(`this browser cannot make a picture of ${canvas.width} by ${canvas.height} pixels: save the figure as SVG`);
    return made;
  } finally {
    URL.revokeObjectURL(address);
  }
}
